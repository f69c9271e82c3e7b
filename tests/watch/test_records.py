"""The records of a run: its folder, the files in it, and the page made from them."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import shutil
import sys
import time
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import PlanError, RankError
from lagom.extensions.observe.report.report import report
from lagom.forward.rows.whole_reasons import WholeReason
from lagom.result import Result
from lagom.run_folder import RunFolder
from lagom.watch import run_dir as module
from lagom.watch.chart import line_chart
from lagom.watch.json_values import as_json
from lagom.watch.run_dir import RunRecords, records
from tests.imported_once import imported_once  # noqa: F401
from tests.watch.heartbeats import report_of


def train(fails: bool) -> dict[str, float]:
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.ones(64, 2))
    for number, (x,) in enumerate(DataLoader(data, batch_size=8)):
        loss = model(x).mean()
        loss.backward()
        print(f"batch {number}")
        if fails and number == 3 and lagom.rank() == 1:
            raise RuntimeError("the <disk> is full")
    os.write(2, b"from C\n")
    return {"loss": float(loss.detach())}


def run(tmp_path: Path, fails: bool = False, **settings: Any) -> Result:
    given: dict[str, Any] = {
        "world_size": 2,
        "launcher": "local",
        "batches": "split",
        "run_dir": tmp_path,
        "name": "a run",
        **settings,
    }
    config = TorchDistributedConfig(hparams={"fails": fails}, **given)
    return experiment.lagom(train, config)


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def loaded(path: Path) -> Any:
    return json.loads(path.read_text())


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
    assert (facts["source"], facts["git"]["folder"]) == (__file__, str(Path(__file__).parents[2]))
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
def test_runs_have_folders_of_their_own_and_none_is_touched(tmp_path: Path) -> None:
    first = run(tmp_path).run_dir
    assert first is not None
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    second = run(tmp_path).run_dir
    assert second != first
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before


@pytest.mark.soak
def test_nothing_is_kept_where_nothing_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = run(tmp_path, run_dir=None)
    assert result.run_dir is None
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="run_dir=None"):
        result.report()


def test_the_environment_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_RUN_DIR", str(tmp_path))
    assert TorchDistributedConfig().run_dir == str(tmp_path)
    monkeypatch.delenv("LAGOM_RUN_DIR")
    assert TorchDistributedConfig().run_dir == "~/.lagom/runs"


def test_a_folder_that_cannot_be_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"run_dir is '.*file/runs'.*name another folder"):
        run(tmp_path, run_dir=tmp_path / "file" / "runs")
    with pytest.raises(ValueError, match="run_dir is 3"):
        TorchDistributedConfig(run_dir=3)  # type: ignore[arg-type]


def test_a_default_that_cannot_be_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert records(tmp_path / "file" / "runs", True, {"name": "x"}) is None
    assert "nothing is kept of this run" in caplog.text


def test_a_rank_that_writes_without_end_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOG_BYTES", 1 << 20)
    kept = records(tmp_path, False, {"name": "../a b"})
    assert kept is not None
    assert kept.folder.parent == tmp_path
    for _ in range(40):
        kept.wrote(3, b"x" * (1 << 16))
    kept.close()
    text = (kept.folder / "rank-3.log").read_bytes()
    assert len(text) < (1 << 20) + (1 << 16)
    assert text.endswith(b"more than 1 MB; the rest is not kept\n")


def test_a_disk_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = records(tmp_path, False, {"name": "x"})
    assert kept is not None
    shutil.rmtree(kept.folder)
    for _ in range(3):
        kept.wrote(0, b"x")
        kept.ended({})
    kept.close()
    assert caplog.text.count("nothing more is kept of this run") == 1


def test_what_is_large_or_strange_is_kept_in_part() -> None:
    class Strange:
        def __repr__(self) -> str:
            raise RuntimeError

    kept = as_json({"list": list(range(10**6)), (1, 2): Strange(), "nan": float("nan"), "tensor": torch.zeros(10**6)})
    assert kept["list"][:3] == [0, 1, 2]
    assert kept["list"][-1] == "… 999800 more"
    assert kept["(1, 2)"] == "<Strange>"
    assert kept["tensor"] == "tensor 1000000 float32"
    arrays = [nn.Parameter(torch.zeros(64, 20)), torch.zeros(30, 9).numpy(), torch.tensor(0.5), pandas.Series([1] * 99)]
    parameter, array, small, table = as_json(arrays)
    assert (parameter, array, small) == ("tensor 64x20 float32", "array 30x9 float32", "tensor(0.5000)")
    assert table.count("\n") > 5
    assert len(json.dumps(kept)) < 10_000
    deep: list[Any] = []
    deep.append(deep)
    json.dumps(as_json(deep))


def test_a_long_run_does_not_keep_every_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    kept = records(tmp_path, False, {"name": "x"})
    assert kept is not None
    for _ in range(100_000):
        now[0] += 1.0
        kept.progressed(report_of(samples=1))
    kept.close()
    assert 500 < len((kept.folder / "progress.jsonl").read_text().splitlines()) < 5000


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


def test_a_chart_has_a_line_for_each_and_round_numbers_at_its_side() -> None:
    drawn = line_chart("Loss", {"rank 0": [(0.0, 0.31), (2.0, 0.17)], "rank 1": [(1.0, float("nan"))]}, " %")
    assert drawn.count("<polyline") == 1
    assert ">0.15 %<" in drawn
    assert ">0.35 %<" in drawn
    assert ">2 s<" in drawn
    same = [(0.0, 1.0), (1.0, 2.0)]
    drawn = line_chart("Loss", {f"rank {n}": same for n in range(3)})
    assert drawn.count("<polyline") == 3
    assert drawn.count('stroke-width="1.6"/>') == 1  # the first, which shows between the dashes of the others
    assert len(set(re.findall('stroke-dasharray="([^"]*)"', drawn))) == 2
    assert line_chart("Loss", {"rank 0": []}) == ""
    assert line_chart("Loss", {"rank 0": [(0.0, 0.0)]}).count("<circle") == 1
    assert len(line_chart("Loss", {"rank 0": [(float(i), float(i)) for i in range(100_000)]})) < 20_000
    drawn = line_chart("Loss", {f"rank {n}": [(0.0, 0.0), (7.3, n)] for n in range(32)})
    assert drawn.count("<polyline") == 32
    assert len(set(re.findall('stroke="(#[^"]*)"', drawn))) == 1
    assert ">32 lines<" in drawn
    few = {f"rank {n}": [(0.0, 1.0)] if n in (3, 11) else [] for n in range(16)}
    assert re.findall(">(rank \\d+|\\d+ lines)<", line_chart("Loss", few)) == ["rank 3", "rank 11"]
    names = re.findall('<text x="(\\d+)" y="224"', line_chart("Loss", {f"rank {n}": same for n in range(90, 98)}))
    assert int(names[-1]) < 450  # there is room for the last name


@pytest.mark.parametrize("low", [-1.7e308, -1e300, 0.0, 5e-324, 1e300])
@pytest.mark.parametrize("high", [5e-324, 1e-310, 1e300, 1.7e308])
def test_a_chart_draws_any_number(low: float, high: float) -> None:
    points = [(0.0, low), (float("nan"), 1.0), (1.0, high), (-1.0, 0.0)]
    drawn = line_chart("Loss", {"rank 0": points}) + line_chart("Loss", {"rank 0": points[:1]})
    assert not re.search("nan|inf", drawn)


@pytest.mark.parametrize(
    ("end", "ticks"),
    [
        (7.3, ["0 s", "2 s", "4 s", "6 s"]),
        (1.0, ["0 s", "0.5 s", "1 s"]),
        (1000.0, ["0 min", "5 min", "10 min", "15 min"]),
        (5400.0, ["0 min", "15 min", "30 min", "45 min", "60 min", "75 min", "90 min"]),
        (86_400.0, ["0 h", "6 h", "12 h", "18 h", "24 h"]),
        (30 * 86_400.0, ["0 h", "120 h", "240 h", "360 h", "480 h", "600 h", "720 h"]),
    ],
)
def test_the_times_below_a_chart_are_round(end: float, ticks: list[str]) -> None:
    drawn = line_chart("Loss", {"rank 0": [(0.0, 1.0), (end, 2.0)]})
    assert re.findall(r">([\d.]+ \w+)</text>", drawn) == ticks


@pytest.mark.soak
def test_all_ranks_are_shown_with_their_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, log="all")
    out, err = capfd.readouterr()
    for rank in range(2):
        assert [line for line in out.splitlines() if line.startswith(f"[rank {rank}]")] == [
            f"[rank {rank}] batch {number}" for number in range(8)
        ]
        assert f"[rank {rank}] from C\n" in err
    run(tmp_path)
    assert capfd.readouterr().out.splitlines() == [f"batch {number}" for number in range(8)]


@pytest.mark.soak  # above, a rank fails by default
def test_ranks_that_die_are_told_of(tmp_path: Path) -> None:
    def dies() -> None:
        os._exit(3)

    with pytest.raises(RankError):
        experiment.lagom(dies, TorchDistributedConfig(launcher="local", world_size=1, run_dir=tmp_path))
    assert loaded(only(tmp_path) / "result.json")["error"] == "RankError"


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
