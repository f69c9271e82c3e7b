"""The records of a run: its folder, the files in it, and the page made from them."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
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
from lagom.result import Result
from lagom.watch import run_dir as module
from lagom.watch.chart import line_chart
from lagom.watch.json_values import as_json
from lagom.watch.run_dir import records
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


@pytest.mark.soak
def test_runs_have_folders_of_their_own_and_none_is_touched(tmp_path: Path) -> None:
    first = run(tmp_path).run_dir
    assert first is not None
    before = {path.name: path.read_bytes() for path in first.iterdir()}
    second = run(tmp_path).run_dir
    assert second != first
    assert {path.name: path.read_bytes() for path in first.iterdir()} == before


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
