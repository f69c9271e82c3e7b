"""``lagom.result``: a read-only mapping that shows itself well."""

from __future__ import annotations

import html.parser
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas  # type: ignore[import-untyped]
import pytest
import torch

from lagom.result import Result


def result(value: Any = 0.25, per_rank: list[Any] | None = None, **more: Any) -> Result:
    return Result(value, [value, value] if per_rank is None else per_rank, seconds=1.5, **more)


def test_the_value_is_the_test_result() -> None:
    assert result(0.25)["test result"] == 0.25
    assert result(0.25).value == 0.25


def test_metrics_of_a_dict_are_keys_beside_the_whole() -> None:
    value = {"loss": 0.5, "auc": 0.9}
    found = result(value)
    assert (found["loss"], found["auc"]) == (0.5, 0.9)
    assert found["test result"] is value
    assert list(found) == ["loss", "auc", "test result"]
    assert len(found) == 3


def test_it_is_a_mapping_as_a_program_expects_one() -> None:
    found = result({"loss": 0.5})
    assert isinstance(found, Mapping)
    assert "loss" in found
    assert "auc" not in found
    assert found.get("auc") is None
    assert dict(found) == {"loss": 0.5, "test result": {"loss": 0.5}}


def test_a_missing_key_is_an_error_naming_those_there_are() -> None:
    with pytest.raises(KeyError, match=r"'acc'.*'loss'.*'test result'"):
        result({"loss": 0.5})["acc"]


def test_it_cannot_be_written_to() -> None:
    found = result()
    with pytest.raises(TypeError):
        found["test result"] = 1  # type: ignore[index]
    for name in ("value", "per_rank", "world_size", "seconds", "run_dir"):
        with pytest.raises(AttributeError):
            setattr(found, name, 1)


def test_what_each_rank_returned_stands_in_rank_order() -> None:
    first, second = object(), object()
    found = result(first, [first, second])
    assert found.per_rank[0] is first
    assert found.per_rank[1] is second
    assert found.world_size == 2


def test_a_metric_called_test_result_does_not_hide_the_value() -> None:
    assert result({"test result": 3})["test result"] == {"test result": 3}


def test_keys_that_are_no_names_stay_in_the_value() -> None:
    found = result({1: "one", "two": 2})
    assert list(found) == ["two", "test result"]
    assert found["test result"] == {1: "one", "two": 2}


@pytest.mark.parametrize("value", [None, 0, "text", torch.ones(3, 3), np.ones(2), [], {}, {"a": torch.ones(1000)}])
def test_anything_can_be_shown(value: Any) -> None:
    found = result(value)
    assert "test result" in repr(found)
    assert (next(iter(value)) if isinstance(value, dict) and value else "test result") in found._repr_html_()


def test_repr_says_what_ran_where_and_how_long() -> None:
    text = repr(result(1 / 3, name="train", where="Spark local[2]"))
    assert "train: 2 ranks on Spark local[2], 1.50 s" in text
    assert "test result: 0.333333" in text
    assert "1 rank," in repr(result(1, [1]))


def test_repr_stays_short_for_long_values() -> None:
    assert len(repr(result(["x" * 1000] * 1000))) < 300


def test_repr_survives_a_value_whose_repr_fails() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "Shy" in repr(result(Shy()))
    assert "Shy" in result({"a": Shy()})._repr_html_()


def test_html_escapes_what_the_program_returned() -> None:
    page = result({"<script>alert(1)</script>": "<img src=x onerror=alert(2)>"}, name="<b>", where="<i>")._repr_html_()
    assert "<script" not in page
    assert "<img" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;" in page
    tags = Tags()
    tags.feed(page)
    assert set(tags.seen) <= {"div", "table", "b", "thead", "tbody", "tr", "th", "td"}
    assert tags.open == []


def test_what_shows_itself_in_a_notebook_does_so_in_the_result() -> None:
    frame = pandas.DataFrame({"name": ["a", "b"], "loss": [0.5, 0.25]})
    assert result(frame)._repr_html_().count("<td>") == 4

    class Shy:
        def _repr_html_(self) -> str:
            raise RuntimeError("no")

    assert "<th" in result(Shy())._repr_html_()


def test_html_shows_each_rank_of_each_metric() -> None:
    first, second = {"loss": 0.5}, {"loss": 0.75}
    page = result({"loss": 0.625}, [first, second])._repr_html_()
    for text in ("0.625", "0.5<", "0.75", "rank 0", "rank 1"):
        assert text in page


def test_html_leaves_out_ranks_that_make_no_table() -> None:
    page = result(1.0, [1.0] * 499 + [2.0])._repr_html_()
    assert len(page) < 5000
    assert "rank 0" in page
    assert "500 ranks" in page


def test_html_has_no_columns_of_ranks_that_returned_the_same() -> None:
    page = result({"loss": 0.5, "auc": 0.75}, name="train")._repr_html_()
    assert "rank 0" not in page
    assert page.count("0.75<") == 1


def test_a_long_run_is_told_in_hours() -> None:
    assert "2 ranks, 1 h 2 min" in repr(Result(1, [1, 1], seconds=3723.3))
    assert "2 ranks, 2 min 5 s" in repr(Result(1, [1, 1], seconds=124.6))


def test_html_shows_how_it_went_where_that_is_kept(tmp_path: Path) -> None:
    lines = [{"seconds": s, "rank": r, "loss": 1 / (s + 1), "rate": 100.0} for s in range(4) for r in range(2)]
    (tmp_path / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = result(run_dir=tmp_path)._repr_html_()
    assert page.count("<svg") == 2
    assert ">Loss<" in page
    assert f"records: {tmp_path}" in page
    (tmp_path / "progress.jsonl").write_text("{not json")
    assert "<svg" not in result(run_dir=tmp_path)._repr_html_()
    assert "<svg" not in result(run_dir=tmp_path / "gone")._repr_html_()


def test_a_result_can_be_pickled() -> None:
    found = pickle.loads(pickle.dumps(result({"loss": 0.5}, name="train")))
    assert found["loss"] == 0.5
    assert found.per_rank == ({"loss": 0.5}, {"loss": 0.5})
    assert "train" in repr(found)


class Tags(html.parser.HTMLParser):
    """The tags of a page, and those left open."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
