"""``lagom show``, ``runs``, ``compare`` and ``search --resume`` of damaged records: one line, never a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lagom import cli, experiment
from lagom.config import TorchDistributedConfig
from lagom.digests import parse_record
from lagom.run_folder import RunFolder
from tests.damage import KINDS, damage

pytestmark = pytest.mark.needs("observe", "search")
FILES = ("run.json", "result.json", "progress.jsonl", "rank-0.log", "timeline.json", "timeline-summary.json")
OTHER_VALUES: tuple[Any, ...] = (None, True, -1, 1 << 70, 0.5, float("nan"), "text", [], [1, "a"], {}, {"a": {"b": 1}})
"""Values of other types, as another version or a person may write them."""


def train() -> dict[str, float]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=4):
        model(x).mean().backward()
        optimizer.step()
    print("trained")
    return {"loss": 0.25, "accuracy": 0.75}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs."""
    top = tmp_path_factory.mktemp("kept")
    for name in ("one", "two"):
        experiment.lagom(
            train, TorchDistributedConfig(launcher="local", world_size=1, name=name, run_dir=top, timeline=True)
        )
    return top


@pytest.fixture
def runs(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these runs."""
    monkeypatch.delenv("DISPLAY", raising=False)
    return tmp_path / "runs"


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command says, once it has shown that it says so in one line, or has succeeded."""
    capsys.readouterr()
    status = cli.main(argv)
    out, error = capsys.readouterr()
    assert "Traceback" not in error
    assert (status, len(error.splitlines())) in ((0, 0), (2, 1)), (status, error)
    return out + error


def look(capsys: pytest.CaptureFixture[str], top: Path) -> dict[str, str]:
    """What each command says about the damaged run; instead of the path of a page, the page."""
    one, two = (os.fspath(next(top.glob(f"*-{name}-*"))) for name in ("one", "two"))
    texts = {
        "show": said(capsys, "show", one),
        "runs": said(capsys, "runs", os.fspath(top)),
        "compare": said(capsys, "compare", two, one),
        "search": said(capsys, "search", "--resume", one),
    }
    if texts["show"].endswith("report.html\n"):
        texts["show"] = Path(texts["show"].strip()).read_text()
    return texts


def try_damage(number: int, kept: Path, top: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(number)
    shutil.rmtree(top, ignore_errors=True)
    shutil.copytree(kept, top)
    run = next(top.glob("*-one-*"))
    path = run / FILES[number % len(FILES)]
    before = path.read_bytes()
    kinds = (*KINDS, "value") if path.name.endswith(".json") else KINDS
    kind = kinds[(number // len(FILES) + number) % len(kinds)]
    if kind == "value":
        put_other_value(path, chance)
        look(capsys, top)
        return
    damage(path, kind, chance)
    texts = look(capsys, top)
    if path.name == "run.json":
        assert_said(texts, ("show", "runs", "compare", "search"), path, before)
    elif path.name == "result.json" and kind != "missing":
        assert_said(texts, ("show", "runs", "compare"), path, before)
    elif path.name.startswith("timeline") and kind in ("cut", "empty", "link", "fifo", "folder", "doubled"):
        assert "There is no" in texts["show"], (number, kind)


def assert_said(texts: dict[str, str], commands: tuple[str, ...], path: Path, before: bytes) -> None:
    """Assert that the commands say that a record is damaged, unless it says the same as before."""
    if path.is_file() and not path.is_symlink():
        try:
            if parse_record(path.read_bytes()) == parse_record(before):
                return
        except ValueError:
            pass
    words = ("damaged", "there are no records", "is no run") if path.exists() else ("is no run", "there are no records")
    for command in commands:
        found = any(word in texts[command] for word in (*words, "-two-"))
        assert found, (command, texts[command])
        assert command == "runs" or "damaged" in texts[command] or not path.is_file(), (command, texts[command])


def put_other_value(path: Path, chance: random.Random) -> None:
    """Put a value of another type somewhere into a record, which then has no digest."""
    facts = json.loads(path.read_bytes())
    facts.pop("digest", None)
    inner: Any = facts
    while True:
        key = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if not isinstance(inner[key], (dict, list)) or not inner[key] or chance.random() < 0.4:
            break
        inner = inner[key]
    inner[key] = chance.choice(OTHER_VALUES)
    path.write_text(json.dumps(facts))


@pytest.mark.parametrize("start", range(0, 36, 6))
def test_damaged_records_end_in_one_line(
    start: int, kept: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(start, start + 6):
        try_damage(number, kept, runs, capsys)


@pytest.mark.soak  # the same as above, 500 times
@pytest.mark.parametrize("start", range(36, 536, 50))
def test_many_damaged_records_end_in_one_line(
    start: int, kept: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(start, start + 50):
        try_damage(number, kept, runs, capsys)


def test_damaged_progress_is_left_out_and_counted(kept: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(kept, runs)
    run = next(runs.glob("*-one-*"))
    with (run / "progress.jsonl").open("a") as file:
        file.write('{"rank": "0", "seconds": 1}\n{"rank": 0, "seconds": "x"}\n[1]\nhalf\n')
        file.write('{"rank": 0, "loss": [1], "seconds": 1}\n{"ra')
    texts = look(capsys, runs)
    assert "5 lines of progress.jsonl are damaged" in texts["show"]
    assert "damaged lines of progress.jsonl" in texts["compare"]


def test_a_damaged_run_goes_on_with_new_records_and_says_so(
    kept: Path, runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from lagom.watch.run_dir import RunRecords

    shutil.copytree(kept, runs)
    run = next(runs.glob("*-one-*"))
    for name in ("run.json", "result.json"):
        damage(run / name, "cut", random.Random(1))
    records = RunRecords(RunFolder.open_own(run), {"name": "one"})
    records.ended({"outcome": "returned", "value": 1})
    records.close()
    assert sum("is damaged" in record.message for record in caplog.records) == 2
    assert [parse_record((run / name).read_bytes()).get("name") for name in ("run.json",)] == ["one"]
