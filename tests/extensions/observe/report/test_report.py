"""Reports of runs, and the records that they show."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import sys
import types
from html.parser import HTMLParser
from pathlib import Path

import pandas  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.extensions.observe.report.report import report
from lagom.forward.rows.whole_reasons import WholeReason
from lagom.result import Result
from lagom.run_folder import RunFolder
from lagom.watch.run_dir import RunRecords, records
from tests.imported_once import imported_once  # noqa: F401
from tests.sources import ROOT
from tests.watch import test_records
from tests.watch.heartbeats import report_of
from tests.watch.test_records import loaded, only, run


def test_a_run_leaves_its_settings_versions_ranks_output_progress_and_result(tmp_path: Path) -> None:
    result = run(tmp_path, seed=7, description="of a test")
    folder = result.run_dir
    assert folder == only(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    facts = loaded(folder / "run.json")
    assert facts["config"]["seed"] == facts["seed"] == 7
    assert facts["config"]["hparams"] == {"fails": False}
    assert facts["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert facts["versions"]["lagom"] == lagom.__version__
    assert facts["driver"]["argv"] == sys.argv
    assert set(facts["ranks"]) == {"0", "1"}
    assert facts["ranks"]["1"]["torch"] == torch.__version__.split("+")[0]
    assert (facts["source"], facts["git"]["folder"]) == (test_records.__file__, str(ROOT))
    assert re.fullmatch("[0-9a-f]{40}", facts["git"]["commit"])
    assert isinstance(facts["git"]["changes"], list)
    assert 0 < facts["seconds_to_join"] < result.seconds
    assert facts["seconds"] == loaded(folder / "result.json")["seconds"] == result.seconds
    assert facts["timings"] == loaded(folder / "result.json")["timings"] == result.timings
    assert list(result.timings) == ["prepare", "slots", "start", "function", "collect"]
    assert sum(result.timings.values()) == pytest.approx(result.seconds)
    page = result.report(tmp_path / "page.html").read_text()
    assert f"{result.seconds:.2f} s" in page
    assert f"<b>{result.timings['function']:.2f} s</b>" in page
    for rank in range(2):
        lines = (folder / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(lines) == sorted([*(f"batch {number}" for number in range(8)), "from C"])
    events = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert {event["rank"] for event in events} == {0, 1}
    assert all(event["memory"] > 10**7 for event in events)
    ends = {event["rank"]: (event["epoch"], event["step"], event["samples"]) for event in events}
    assert ends == {0: (1, 8, 32), 1: (1, 8, 32)}
    assert [{event["rank"]: event["loss"] for event in events}[rank] for rank in (0, 1)] == [
        value["loss"] for value in result.per_rank
    ]
    ended = loaded(folder / "result.json")
    assert (ended["outcome"], ended["value"]) == ("returned", result.value)
    assert ended["per_rank"] == list(result.per_rank)


class Mixing(nn.Linear):
    """Mixes the rows of its batch."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = super().forward(input)
        return found - found.mean(0)


def train_mixing() -> None:
    mixing, small = Mixing(1024, 1024), nn.Linear(2, 1)
    for _ in range(4):
        mixing(torch.randn(1024, 1024)).sum().backward()
        small(torch.randn(8, 2)).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_modules_that_ran_whole_are_in_the_result_the_records_and_the_report(tmp_path: Path, world_size: int) -> None:
    config = TorchDistributedConfig(launcher="local", world_size=world_size, run_dir=tmp_path)
    result = experiment.lagom(train_mixing, config)
    folder = result.run_dir
    assert folder is not None
    wanted = {"Mixing": WholeReason.MIXES_ROWS, "Linear": WholeReason.SMALL} if world_size > 1 else {}
    assert {one.name: one.reason for one in result.whole} == wanted
    assert sum(one.share for one in result.whole) == pytest.approx(float(world_size > 1))
    assert all(one.calls == 3 for one in result.whole)
    assert loaded(folder / "run.json")["whole"] == [one.as_json() for one in result.whole]
    page = result.report().read_text()
    assert page.count("Modules that ran whole") == (world_size > 1)
    for one in result.whole:
        assert f"<td>{one.name}</td><td>{one.kind}</td><td>3</td><td>{one.share:.1%}</td><td>{one.text}</td>" in page


def test_settings_named_like_secrets_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hf-token", "hidden-1", "--api_key=hidden-2", "--keys", "--lr=0.1"])
    sys.argv.insert(1, "--out=s3://me:hidden-9@bucket/x?key=hidden-10")
    settings = {
        "password": "hidden-3",
        "wandbApiKey": "hidden-4",
        "logins": [{"user": "me", "AWS_SECRET_ACCESS_KEY": "hidden-5", "secrets": {"any": ["hidden-6"]}}],
        "pin": {"secret": 71077345},
        "options": types.SimpleNamespace(lr=0.5, access_token="hidden-7", max_tokens=16),
        "max_tokens": 512,
        "num_keys": 3,
        "tokenizer": "words",
        "token": None,
        "monkey": "see",
        "store": "postgresql://me:hidden-11@host/runs?sslkey=hidden-12, and http://host/page",
    }
    config = {"hparams": settings, "deepspeed_config": {"key": b"hidden-8"}}
    kept_records = records(tmp_path, False, {"name": "a run", "config": config})
    assert kept_records is not None
    kept_records.close()
    folder = kept_records.folder
    text = (folder / "run.json").read_text() + report(RunFolder.open(folder))
    assert "hidden-" not in text
    assert "71077345" not in text
    kept = loaded(folder / "run.json")["config"]["hparams"]
    shown = {name: kept[name] for name in ("max_tokens", "num_keys", "tokenizer", "token", "monkey")}
    assert shown == {"max_tokens": 512, "num_keys": 3, "tokenizer": "words", "token": None, "monkey": "see"}
    assert (kept["password"], kept["logins"][0]["user"]) == ("(hidden)", "me")
    assert kept["store"] == "postgresql://(hidden)@host/runs?(hidden) and http://host/page"
    assert "lr=0.5" in kept["options"]
    assert "max_tokens=16" in kept["options"]
    assert loaded(folder / "run.json")["driver"]["argv"][-2:] == ["--keys", "--lr=0.1"]
    assert "--out=s3://(hidden)@bucket/x?(hidden)" in loaded(folder / "run.json")["driver"]["argv"]


def test_a_run_that_fails_leaves_its_error_and_what_ranks_wrote(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the <disk> is full"):
        run(tmp_path, fails=True)
    ended = loaded(only(tmp_path) / "result.json")
    assert (ended["outcome"], ended["error"], ended["message"]) == ("raised", "RuntimeError", "the <disk> is full")
    assert ended["rank"] == 1
    assert "in train" in ended["traceback"]
    assert "batch 3" in (only(tmp_path) / "rank-1.log").read_text()
    page = report(RunFolder.open(only(tmp_path)))
    assert "the &lt;disk&gt; is full" in page
    assert "<disk>" not in page


@pytest.mark.soak
def test_nothing_is_kept_where_nothing_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = run(tmp_path, run_dir=None)
    assert result.run_dir is None
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="run_dir=None"):
        result.report()


class Page(HTMLParser):
    """Finds what a page would load from elsewhere, and whether its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")] + [tag] * (tag == "script")
        if tag not in ("meta", "line", "polyline", "circle", "html", "body"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def test_the_report_is_one_page_that_loads_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, description="to <see>")
    page = result.report()
    assert page == result.run_dir / "report.html"  # type: ignore[operator]
    text = page.read_text()
    read = Page(text)
    assert not read.loads
    assert not read.open
    assert "to &lt;see&gt;" in text
    for shown in ("a run", "2 ranks on this machine", "Samples per second", "batch 7", "commit"):
        assert shown in text
    assert re.search(r", begun \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, ", text)
    assert text.count("Output of ranks 0, 1") == text.count("batch 7") == 1
    assert result.report(tmp_path / "other.html").read_text() == text
    for rank in (0, 1):  # the page shows the end of long outputs, which is the same
        (result.run_dir / f"rank-{rank}.log").write_text("0" * rank + "\n" + "the end\n" * 5000)  # type: ignore[operator]
    differs = result.report().read_text()
    assert differs.index("Output of rank 0") < differs.index("the end") < differs.index("Output of rank 1")


def test_a_notebook_shows_a_report_as_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "run.json").write_text('{"name": "a run"}')
    result = Result(1, [1], seconds=1.0, run_dir=tmp_path / "a run")
    page = result.report()
    assert (page, os.fspath(page)) == (tmp_path / "a run" / "report.html", f"{tmp_path}/a run/report.html")
    assert pickle.loads(pickle.dumps(page)) == page
    monkeypatch.chdir(tmp_path)
    assert "href='a%20run/report.html'" in page._repr_html_()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # whose notebooks cannot ask for a file above
    text = re.search(r"href='data:text/html;base64,([^']+)'", page._repr_html_())
    assert text is not None
    assert base64.b64decode(text[1]) == page.read_bytes()
    assert f">{page}</a>" in page._repr_html_()


def test_a_run_that_was_cut_short_has_a_report_too(tmp_path: Path) -> None:
    kept = RunRecords(tmp_path, {"name": "x", "world_size": 1})
    kept.progressed(report_of(samples=1, loss=float("nan"), rate=1.0))
    kept.close()
    with (tmp_path / "progress.jsonl").open("a") as file:
        file.write('{"seconds": 1')
    assert "It has no end" in report(RunFolder.open(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no records"):
        report(RunFolder.open(tmp_path / "empty"))


def test_the_loss_is_that_of_a_batch_as_ranks_have_it_whole_by_default(tmp_path: Path) -> None:
    kept = RunRecords(tmp_path, {"name": "x", "world_size": 1})
    kept.progressed(report_of(samples=1, loss=0.5))
    kept.close()
    assert ">Loss of a batch<" in report(RunFolder.open(tmp_path))


def test_a_table_that_was_returned_keeps_its_lines_in_the_report(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"name": ["first", "second"], "loss": [0.5, 0.25]})
    config = TorchDistributedConfig(launcher="inline", run_dir=tmp_path)
    for value in (frame, {"auc": 0.9, "frame": frame}):
        page = experiment.lagom(lambda value=value: value, config).report().read_text()
        assert re.search(r"<pre>[^<]*\n0 +first +0.50?\n1 +second +0.25", page)
    assert "auc: 0.9\nframe:\n" in page


def test_large_results_are_short_in_the_report_with_numbers_first(tmp_path: Path) -> None:
    value = {"state": nn.Linear(64, 20).state_dict(), "losses": [1 / n for n in range(1, 101)], "auc": 0.9}
    config = TorchDistributedConfig(launcher="inline", run_dir=tmp_path)
    page = experiment.lagom(lambda: value, config).report().read_text()
    shown = page.partition("<pre>")[2].partition("</pre>")[0].splitlines()
    state = (
        "state: {&quot;weight&quot;: &quot;tensor 20x64 float32&quot;, &quot;bias&quot;: &quot;tensor 20 float32&quot;}"
    )
    assert shown == ["auc: 0.9", state, "losses: […, 0.01]"]
    page = experiment.lagom(lambda: {f"layer{n}": [0] for n in range(150)}, config).report().read_text()
    assert "layer29: [0]\nand 120 more</pre>" in page


def test_a_rank_that_is_waited_for_is_named_though_the_curves_are_of_the_first_16(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"name": "many"}))
    lines = [
        {"rank": rank, "seconds": second, "loss": 1.0, "waits": 0.3 * (rank != 18), "data": 0.2 * (rank == 17)}
        | ({"waits_for": {"18": 0.3}} if rank != 18 else {})
        for second in range(3)
        for rank in range(20)
    ]
    (tmp_path / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report(RunFolder.open(tmp_path))
    assert "The others waited 30% of their time for rank 18." in page
    assert "Rank 17 waited 20% of its time for data" in page
    assert page.count("<polyline") == 3 * 16  # loss, waiting for data and for other ranks
