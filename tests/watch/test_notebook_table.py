"""``lagom.watch.notebook_table``: how far ranks are, as a table."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lagom.watch.notebook_table import NotebookTable, left, table
from lagom.wire.messages import ProgressReport
from tests.watch.heartbeats import report_of


def rank(**more: Any) -> ProgressReport:
    seen: dict[str, Any] = {
        "epoch": 2,
        "step": 30,
        "steps": 120,
        "samples": 4096,
        "loss": 0.125,
        "rate": 512.0,
        "data": 0.41,
    }
    return report_of(**seen | {"memory": 2 * 10**9, "steps_s": 1.5, "cpu": 1.27} | more)


def test_each_rank_is_a_row_and_the_caption_sums_them_up() -> None:
    text = table("train: 2 ranks on <Spark>", {0: rank(), 1: rank(step=60, loss=None, data=0.01, rate=488.0)})
    caption, rows = text.split("<tbody>")
    assert "device" not in caption  # no rank has one
    assert "<b>train</b>: 2 ranks on &lt;Spark&gt;</div>" in caption
    assert "8,192 samples, 1,000/s, this epoch ends in 1:00</div>" in caption
    first, second = re.findall("<tr>.*?</tr>", rows)
    for shown in (
        ">0<",
        ">2<",
        ">30/120<",
        "width:25%",
        ">4,096<",
        ">512<",
        ">0.125<",
        ">41%</b>",
        ">2.00 GB<",
        ">1.3<",
    ):
        assert shown in first
    assert "<b" not in second


def test_values_that_extensions_set_are_columns() -> None:
    text = table("train", {0: None, 1: rank(values={"a<b": 12345}), 2: rank(values={"norm": 0.123456})})
    head, *rows = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in text.split("<tr>")[1:])
    assert head[-2:] == ["a&lt;b", "norm"]
    assert [row[-2:] for row in rows] == [["", ""], ["12,345", ""], ["", "0.1235"]]


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
    assert ">31%</b>" in second
    assert ">87%<" in second


def test_a_rank_that_starts_has_no_epoch_yet() -> None:
    begun, starting = report_of(memory=10**9), report_of(memory=10**9, starts=True)
    text = table("train", {0: starting, 1: starting})
    assert "<div>starting</div>" in text
    assert ">starting<" in text.split("<tbody>")[1]
    assert not re.search(r"samples|>step<", text)
    text = table("train", {0: rank(), 1: None})
    assert "4,096 samples" in text
    assert ">starting<" in re.findall("<tr>.*?</tr>", text)[2]
    text = table("train", {0: begun, 1: starting})
    assert re.findall(">(running|starting)</td>", text) == ["running", "starting"]
    assert "<div>running</div>" in table("train", {0: begun, 1: begun})


def test_a_loss_that_is_no_number_is_loud() -> None:
    assert "<b style='color:#d55e00'>nan</b>" in table("train", {0: rank(loss=float("nan"))})


def test_how_the_run_ended_takes_the_place_of_what_it_has_still_to_go() -> None:
    text = table("train", {0: rank()}, "failed on rank 0: <ValueError>")
    assert "4,096 samples, <b>failed on rank 0: &lt;ValueError&gt;</b></div>" in text
    assert "this epoch" not in text
    assert "running" in table("train", {0: report_of(memory=10**9)})
    assert "running" not in table("train", {0: report_of(memory=10**9)}, "done")


def test_a_rank_that_makes_no_progress_is_loud_until_the_run_ends() -> None:
    text = table("train", {0: rank(), 1: rank()}, stalled=[1])
    assert ">rank 1 made no progress</b></div>" in text
    assert "this epoch ends in" not in text
    first, second = re.findall("<tr>.*?</tr>", text.split("<tbody>")[1])
    assert "<b style='color:#d55e00'>1</b>" in second
    assert ">0<" in first
    assert "made no progress" not in table("train", {0: rank(), 1: rank()}, "failed", stalled=[1])


class LastShown:
    """A front end that keeps the last page."""

    page = ""

    def display(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> LastShown:
        self.page = bundle["text/html"]
        return self


def waiting() -> str:
    """The page before any rank has reported."""
    NotebookTable(shown := LastShown()).wait("train: 2 ranks on Spark", "waiting for 2 tasks")
    return shown.page


def notice() -> str:
    """The page of a message in which nothing is wrong."""
    NotebookTable(shown := LastShown()).show_notice("lagom: Net is small: every rank computes it whole")
    return shown.page


STRAGGLER = {0: rank(waits=0.31, waits_for={"1": 0.31}), 1: rank(step=25, samples=3400, rate=425.0, waits=0.0)}
STARTS = report_of(memory=10**9, starts=True)
STATES = {
    "waits": waiting(),
    "starts": table("train: 2 ranks", {0: STARTS, 1: STARTS}),
    "runs": table("train: 2 ranks", {0: rank(), 1: rank()}),
    "has a straggler": table("train: 2 ranks", STRAGGLER),
    "stalls": table("train: 2 ranks", {0: rank(), 1: rank()}, stalled=[1]),
    "done": table("train: 2 ranks", {0: rank(), 1: rank()}, "done"),
    "interrupted": table("train: 2 ranks", {0: rank(), 1: rank()}, "interrupted"),
    "failed": table("train: 2 ranks", {0: rank(), 1: rank()}, "failed on rank 0: ValueError"),
    "32 ranks": table("train", {number: rank(waits=0.3, waits_for={"1": 0.3}, gpu=0.5) for number in range(32)}),
}


def test_a_state_can_be_told_by_its_colour() -> None:
    colours = {name: re.findall(r"border-left:4px solid (#\w+)", page) for name, page in STATES.items()}
    assert all(len(found) == 1 for found in colours.values())
    assert colours["stalls"] == colours["failed"]
    assert colours["32 ranks"] == colours["runs"] == colours["starts"] == colours["has a straggler"]
    assert colours["waits"] == colours["interrupted"]
    assert len({found[0] for found in colours.values()}) == 4


@pytest.mark.parametrize("page", [*STATES.values(), notice()], ids=[*STATES, "notice"])
def test_a_state_is_readable_on_light_and_dark_pages_and_needs_no_page_around_it(page: str) -> None:
    """Databricks shows it in a frame of its own, without scripts or styles of the page."""
    for colour in set(re.findall(r"(?<!back)(?:color|solid|background)[: ]+(#\w{6})", page)):
        assert min(contrast(colour, "#ffffff"), contrast(colour, "#111111")) >= 3, colour
    assert not re.search(r"<(script|style|link|img)|class=|https?:", page)
    assert "overflow-x:auto" in page
    assert page.count("<div") == page.count("</div>")
    assert max((len(row) for row in re.findall("<tr>.*?</tr>", page)), default=0) < 3000
    assert width(page) < 800


def width(page: str) -> float:
    """Return about how narrow the table can be, in pixels: 8 for a letter, 11 between columns, 126 for a bar."""
    rows = [re.findall("<t([hd]).*?>(.*?)</t[hd]>", row) for row in re.findall("<tr>.*?</tr>", page)]
    sizes = [
        [max(8.0 * _longest(text, kind == "h"), 126.0 if "width:9em" in text else 0.0) for kind, text in row]
        for row in rows
        if len(row) == len(rows[0])
    ]
    return sum(11.0 + float(max(cells)) for cells in zip(*sizes, strict=True))


def _longest(cell: str, breaks: bool) -> int:
    text = re.sub("<.*?>", "", cell)
    return max(map(len, text.split() or [""])) if breaks else len(text)


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours by the rule of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)
