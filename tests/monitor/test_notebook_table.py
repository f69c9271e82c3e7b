"""``lagom.monitor.notebook_table``: how far ranks are, as a table."""

from __future__ import annotations

import re
from typing import Any

from lagom.monitor.notebook_table import NotebookTable, left, table


def rank(**more: Any) -> dict[str, Any]:
    seen = {"epoch": 2, "step": 30, "steps": 120, "samples": 4096, "loss": 0.125, "rate": 512.0, "data": 0.41}
    return seen | {"memory": 2 * 10**9, "steps_s": 1.5, "cpu": 1.27, "gpu": None} | more


def test_each_rank_is_a_row_and_the_caption_sums_them_up() -> None:
    text = table("train on <Spark>", {0: rank(), 1: rank(step=60, loss=None, data=0.01, rate=488.0)})
    caption, rows = text.split("<tbody>")
    assert "GPU" not in caption  # no rank has one
    assert "train on &lt;Spark&gt;</b>: 8,192 samples, 1,000/s, this epoch ends in 1:00" in caption
    first, second = re.findall("<tr>.*?</tr>", rows)
    for shown in (
        ">0<",
        ">2<",
        ">30/120<",
        "width:25%",
        ">4,096<",
        ">512<",
        ">0.125<",
        "<b>41%</b>",
        ">2.00 GB<",
        ">1.3<",
    ):
        assert shown in first
    assert "<b>" not in second


def test_of_many_ranks_the_last_are_shown() -> None:
    text = table("train", {number: rank(samples=1000 - number) for number in range(40)})
    assert text.count("<tr>") == 1 + 16 + 1
    assert ">39<" in text
    assert ">0<" not in text
    assert "24 more ranks" in text


def test_the_end_is_that_of_the_slowest_or_not_known() -> None:
    assert left({0: rank(step=119), 1: rank(step=0, steps=18000)}) == ", this epoch ends in 3:20:00"
    assert left({0: rank(), 1: rank(steps=None)}) == ""
    assert left({0: rank(), 1: rank(steps_s=0.0)}) == ""


def test_the_cell_has_one_display_that_is_renewed() -> None:
    class Display:
        def __init__(self) -> None:
            self.shown: list[dict[str, str]] = []
            self.updates: list[dict[str, str]] = []

        def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Display:
            assert raw
            assert display_id
            self.shown.append(bundle)
            return self

        def update(self, bundle: dict[str, str], *, raw: bool) -> None:
            self.updates.append(bundle)

    display = Display()
    shown = NotebookTable(display)
    for step in range(3):
        shown.show("train", {0: rank(step=step)}, f"step {step}")
    assert [bundle["text/plain"] for bundle in display.shown] == ["step 0"]
    assert [bundle["text/plain"] for bundle in display.updates] == ["step 1", "step 2"]
    assert "2/120" in display.updates[-1]["text/html"]


def test_who_holds_up_the_others_is_seen() -> None:
    text = table("train", {0: rank(waits=0.31, waits_for={"1": 0.31}), 1: rank(waits=0.02, gpu=0.87)})
    first, second = re.findall("<tr>.*?</tr>", text.split("<tbody>")[1])
    assert ">31%<" in first
    assert "<b>31%</b>" in second
    assert ">87%<" in second


def test_a_loss_that_is_no_number_is_loud() -> None:
    assert "<b style='color:#d55e00'>nan</b>" in table("train", {0: rank(loss=float("nan"))})


def test_how_the_run_ended_takes_the_place_of_what_it_has_still_to_go() -> None:
    text = table("train", {0: rank()}, "failed on rank 0: <ValueError>")
    assert "train</b>: 4,096 samples, failed on rank 0: &lt;ValueError&gt;</div>" in text
    assert "this epoch" not in text
