"""``lagom.show``, ``lagom runs`` and ``lagom compare``: what can be seen of runs that have ended."""

from __future__ import annotations

import os
import re
import webbrowser
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lagom
from lagom import cli, experiment
from lagom.config import TorchDistributedConfig
from lagom.run_folder import RunFolder
from lagom.watch.retention import lock_run


def train(lr: float, fails: bool = False) -> dict[str, float]:
    model = nn.Linear(1, 1)
    for number, x in enumerate(DataLoader(TensorDataset(torch.ones(32, 1)), batch_size=8)):
        model(x[0]).mean().backward()
        if fails and number:
            raise ArithmeticError("it fails")
    return {"loss": lr / 3}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of three runs: two have returned, the last has failed."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("LAGOM_RUN_DIR", str(folder))
    for number, hparams in enumerate(({"lr": 0.3}, {"lr": 0.6}, {"lr": 0.3, "fails": True})):
        config = TorchDistributedConfig(hparams=hparams, launcher="inline", name=f"run{number}", seed=number)
        try:
            experiment.lagom(train, config)
        except ArithmeticError:
            assert number == 2
    return folder


def named(runs: Path, name: str) -> Path:
    return next(runs.glob(f"*-{name}-*"))


def lagom_says(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert cli.main(argv) == 0
    return capsys.readouterr().out


def test_runs_are_listed_with_result_seconds_and_git(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_run(RunFolder.open(named(runs, "run1"))):
        (named(runs, "run1") / "result.json").unlink()
        head, first, second, third = lagom_says(capsys, "runs").splitlines()
    assert head.split() == ["run", "result", "seconds", "ranks", "git"]
    assert re.search(r"-run0-\w+  loss 0\.1 +\d+\.\d +1 *([0-9a-f]{9}\+?.*)?$", first)
    assert "under way" in second
    assert "ArithmeticError" in third
    assert "no end: its driver was killed" in lagom_says(capsys, "runs", str(runs))
    assert lagom_says(capsys, "runs", "-n", "1").splitlines()[0] == f"2 older runs are in {runs}"
    assert lagom_says(capsys, "runs", str(runs / "none")) == f"there are no runs in {runs / 'none'}\n"


def test_what_a_run_returned_is_listed_in_a_few_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [4 / number for number in range(1, 41)]
    values = (losses, {"losses": losses, "auc": 0.75}, losses[:2], None)
    for number, value in enumerate(values):
        config = TorchDistributedConfig(launcher="inline", name=f"run{number}", run_dir=tmp_path)
        experiment.lagom(lambda value=value: value, config)
    cells = [re.split(" {2,}", line)[1] for line in lagom_says(capsys, "runs", str(tmp_path)).splitlines()[1:]]
    assert sorted(cells) == sorted(["[…, 0.1]", "auc 0.75, losses […, 0.1]", "[4, 2]", "done"])


@pytest.mark.needs("observe")
def test_a_comparison_has_what_differs_alone(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = lagom_says(capsys, "compare", "run0", str(named(runs, "run1")))
    rows = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in said.splitlines()[1:])
    assert rows["hparams.lr"].split() == ["0.3", "0.6"]
    assert rows["seed"].split() == ["0", "1"]
    assert rows["result"].split() == ["loss", "0.1", "loss", "0.2"]
    assert not {"batches", "torch", "world_size", "git", "module"} & rows.keys()


@pytest.mark.needs("observe")
def test_curves_are_compared_at_equal_shares_of_the_samples(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, factor in (("run0", 1), ("run1", 2)):
        lines = [
            f'{{"rank": 0, "seconds": {at}, "samples": {at * 10 * factor}, "loss": {factor / at}}}'
            for at in range(1, 5)
        ]
        (named(runs, name) / "progress.jsonl").write_text("\n".join(lines))
    said = lagom_says(capsys, "compare", "run0", "run1")
    rows = {name: rest.split() for name, rest in re.findall(r"^(\S.*?) {2,}(.*)$", said, re.MULTILINE)}
    assert rows["loss at 50% of the samples"] == ["0.5", "1"]
    assert rows["last loss"] == ["0.25", "0.5"]
    assert rows["samples per second of rank 0"] == ["10", "20"]


@pytest.mark.needs("observe")
def test_a_curve_of_few_points_has_no_loss_at_other_shares(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, ends in (("run0", (10, 40)), ("run1", (20, 40))):
        lines = [f'{{"rank": 0, "seconds": {at}, "samples": {at}, "loss": {at / 8}}}' for at in ends]
        (named(runs, name) / "progress.jsonl").write_text("\n".join(lines))
    said = lagom_says(capsys, "compare", "run0", "run1")
    rows = {name: rest.split() for name, rest in re.findall(r"^(\S.*?) {2,}(.*)$", said, re.MULTILINE)}
    assert {name: both for name, both in rows.items() if "of the samples" in name} == {
        "loss at 25% of the samples": ["1.25", "-"],
        "loss at 50% of the samples": ["-", "2.5"],
    }
    assert [name for name in rows if "loss" in name or "speed" in name][:3] == [
        "loss at 25% of the samples",
        "loss at 50% of the samples",
        "last loss",
    ]
    assert rows["last loss"] == ["5", "5"]


@pytest.mark.needs("observe")
def test_the_report_of_an_older_run_is_opened(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    page = lagom.show(named(runs, "run2"))
    assert "it fails" in page.read_text()
    assert opened == []  # a browser in the terminal would take its place
    monkeypatch.setenv("DISPLAY", ":0")
    assert lagom.show("run2") == page
    assert opened == [page.as_uri()]


@pytest.mark.needs("observe")
def test_a_page_that_the_run_has_left_is_shown_as_it_is(runs: Path) -> None:
    page = named(runs, "run0") / "report.html"
    page.write_text("the page of a search")
    assert lagom.show("run0").read_text() == "the page of a search"
    os.utime(page, (0, 0))  # written before the run's end
    assert "<h1>run0" in lagom.show("run0").read_text()


def test_what_is_no_run_is_named(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'nothing' is no run: neither a folder with a run\.json, nor a name in "):
        lagom.show("nothing")
    with pytest.raises(ValueError, match=r"'run' is in the names of 3 runs: .*; name one of them"):
        lagom.show("run")
    for place, said in (("s3://bucket/runs", "copy them to this machine"), ("", "runs are not kept")):
        monkeypatch.setenv("LAGOM_RUN_DIR", place)
        with pytest.raises(ValueError, match=said):
            lagom.show("run0")
