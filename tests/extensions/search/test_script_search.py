"""``lagom search``: a script's options are searched, and the numbers that it prints are the metric."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from lagom import cli
from lagom.digests import parse_record
from lagom.extensions.search.on_rank.script_trial import PrintedMetric

Search: TypeAlias = Callable[..., tuple[int, str, str]]
"""Takes the words behind ``lagom search``; returns exit status, standard output and standard error."""

PROGRAM = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--act", choices=("relu", "tanh"), default="relu")
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()
for epoch in range(args.epochs):
    print(f"epoch {epoch}: loss = {(args.lr + 0.5) ** 2 + 1 / (epoch + 1) + (args.act == 'tanh')}")
with open("best.txt", "w") as file:
    file.write(str(args.lr))
"""


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Search:
    """``lagom search``, called in this process as if begun in a folder with the script."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("LAGOM_RUN_DIR", str(tmp_path / "runs"))

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        monkeypatch.setattr("sys.argv", ["lagom", "search", *words])
        return cli.main(), *capfd.readouterr()

    return call


def trials(folder: Path) -> list[Path]:
    """The folders of all trials of the one search below ``folder``."""
    (run,) = (folder / "runs").iterdir()
    return sorted((run / "trials").iterdir())


@pytest.mark.soak
def test_the_best_options_are_a_command_that_gives_the_best_value_again(search: Search, tmp_path: Path) -> None:
    words = "--trials 5 --slots 2 --seed 3 --space lr=float:-1:1 --space act=relu,tanh --metric loss --optimizer random"
    status, out, error = search(*words.split(), "program.py", "--epochs", "2")
    assert status == 0, error
    assert "trials: 5 complete" in out
    command = shlex.split(out.strip().splitlines()[-1])
    assert command[:7] == ["lagom", "run", "-n", "1", "--seed", "3", "program.py"]
    again = subprocess.run([sys.executable, *command[6:]], capture_output=True, text=True, check=True, cwd=tmp_path)
    best = re.search(r"best: (\S+),", out)
    assert best is not None
    assert f"{float(again.stdout.split()[-1]):.6g}" == best[1]
    printed = [float((folder / "output.txt").read_text().split()[-1]) for folder in trials(tmp_path)]
    assert f"{min(printed):.6g}" == best[1]


def test_without_options_of_a_run_the_command_is_pythons(search: Search, tmp_path: Path) -> None:
    _, out, error = search("--trials", "1", "--space", "lr=1,2", "--metric", "loss", "python", "program.py")
    assert re.search(r"\n  python program.py --lr [12]\n$", out), error
    assert (tmp_path / "best.txt").read_text() in ("1.0", "2.0")


def test_a_search_goes_on_by_the_name_of_its_folder_alone(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--trials", "2", "--space", "lr=log:1e-5:1e-1", "--metric", "loss", "program.py"]
    assert search(*words)[0] == 0
    (run,) = (tmp_path / "runs").iterdir()
    told = parse_record((run / "run.json").read_text())
    told["driver"]["argv"][told["driver"]["argv"].index("2")] = "3"  # as if it had been killed
    (run / "run.json").write_text(json.dumps(told))
    monkeypatch.chdir("/")
    for _ in range(2):
        status, out, error = search("--resume", str(run))
        assert (status, "trials: 3 complete" in out) == (0, True), error
    assert "best.txt" in {path.name for path in tmp_path.iterdir()}


def test_printed_values_end_bad_trials(search: Search, tmp_path: Path) -> None:
    words = ["--slots", "1", "--optimizer", "grid", "--es-policy", "asha", "--space", "lr=0,1,2,3,4", "--metric"]
    status, out, error = search(*words, "loss", "--seed", "0", "program.py", "--epochs", "40")
    assert status == 0, error
    assert "pruned" in out
    lengths = {len((folder / "output.txt").read_text().splitlines()) for folder in trials(tmp_path)}
    assert 40 in lengths
    assert min(lengths) < 40


def test_a_trial_of_two_ranks_of_which_one_prints(search: Search, tmp_path: Path) -> None:
    guarded = PROGRAM.replace("    print(", "    if lagom.rank() == 0: print(").replace(
        "import argparse", "import lagom, argparse"
    )
    (tmp_path / "program.py").write_text(guarded)
    words = ["-n", "2", "--slots", "1", "--trials", "2", "--space", "lr=1,2", "--optimizer", "grid", "--metric", "loss"]
    status, out, error = search(*words, "program.py")
    assert status == 0, error
    assert "best: 3.25," in out
    assert out.endswith("\n  lagom run -n 2 program.py --lr 1\n")


def test_a_script_without_the_metric_ends_the_search_with_the_line_that_it_printed(search: Search) -> None:
    words = ["--space", "lr=1,2", "--trials", "2", "--slots", "1", "--metric", "accuracy", "program.py"]
    status, _, error = search(*words)
    last = error.splitlines()[-1]
    assert status == 2
    assert "lagom: program.py printed no line with 'accuracy' and a number, such as" in last
    assert "Its last line was 'epoch 0: loss = " in last


@pytest.mark.parametrize("num_trials", ["2", pytest.param("20", marks=pytest.mark.soak)])
def test_a_script_without_the_option_is_told_in_its_own_words(num_trials: str, search: Search) -> None:
    words = ["--space", "speed=1,2", "--trials", num_trials, "--metric", "loss", "program.py", "--lr", "1"]
    status, _, error = search(*words)
    assert status in (1, 2)
    assert "    program.py: error: unrecognized arguments: --speed" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--metric loss p.py", "there is no --space, so nothing to search; want lr=float:0.1:0.9, "),
        ("--space lr --metric loss p.py", "--space lr: want lr=float"),
        ("--space =1,2 --metric loss p.py", "--space =1,2: want lr=float"),
        ("--space lr= --metric loss p.py", "--space lr=: want lr=float"),
        ("--space lr=0.1 --metric loss p.py", "--space lr=0.1: one value; want lr=float"),
        ("--space lr=lgo:1:2 --metric loss p.py", "a range is float, log, int, intlog; did you mean 'log'?"),
        ("--space lr=log:1 --metric loss p.py", "want the lowest and the highest value, as in log:1:10"),
        ("--space lr=log:0:1 --metric loss p.py", "lr begins at 0.0; a logarithmic range begins above 0"),
        ("--space lr=float:1:x --metric loss p.py", "--space lr=float:1:x: 'x' is no number"),
        ("--space lr=float:2:1 --metric loss p.py", "lr goes from 2.0 to 1.0; the first must be less"),
        ("--space n=int:1:2.5 --metric loss p.py", "--space n=int:1:2.5: '2.5' is no whole number"),
        ("--space n=1,1 --metric loss p.py", "--space n=1,1: n has the value 1 twice"),
        ("--space n=1,2 --space n=3,4 --metric loss p.py", "--space n=3,4: searchspace has 'n' twice"),
        ("--space n=1,2 p.py", "there is no --metric; want the name of a number that the script prints"),
        ("--space n=1,2 --metric loss p.py", "the search would never end; give --trials N, --timeout-s S, or both"),
        ("--space n=1,2 --metric loss --trials 2 --direction up p.py", "direction is 'up'; want 'max' or 'min'"),
        ("--space n=1,2 --metric loss --trials 2 p.py", "there is no script 'p.py' here"),
        ("--space n=1,2 --metric loss --trials 2", "want a script, as in: lagom search --space"),
        ("--resume .", "there are no records of a search"),
    ],
)
def test_a_wrong_word_is_one_line(words: str, said: str, search: Search) -> None:
    status, out, error = search(*words.split())
    assert said in error
    assert (status, out, error.count("\n"), error[:7]) == (2, "", 1, "lagom: ")


def test_a_search_without_records_in_which_all_trials_fail_says_why(search: Search) -> None:
    words = ["--run-dir", "", "--space", "speed=1,2", "--trials", "2", "--metric", "loss", "program.py", "--lr", "1"]
    status, _, error = search(*words)
    assert status == 1
    assert "lagom: no trial ran to its end: " in error
    assert "Traceback" not in error


def test_a_search_in_which_no_trial_began_fails(search: Search) -> None:
    status, out, error = search("--timeout-s", "1e-9", "--space", "lr=1,2", "--metric", "loss", "program.py")
    assert (status, "trials: none" in out) == (1, True)
    assert "lagom: no trial ran to its end: none began in --timeout-s\n" in error


def test_a_script_that_starts_ranks_by_itself_is_no_trial(search: Search, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("from maggy import experiment\nexperiment.lagom(print, None)\n")
    status, _, error = search("--trials", "1", "--space", "lr=1,2", "--metric", "loss", "program.py")
    assert status == 2
    assert "have it call lagom() with a HyperparameterOptConfig" in error


@pytest.mark.soak  # test_search.py shows it by default
def test_ctrl_c_prints_the_best_so_far(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import sys, time\nprint('loss:', sys.argv[2])\ntime.sleep(float(sys.argv[2]))\n")
    words = ["--run-dir", "runs", "--slots", "1", "--optimizer", "grid", "--space", "s=0.1,600", "--metric", "loss"]
    command = [sys.executable, "-m", "lagom", "search", *words, "--seed", "1", "slow.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/*/trials/0001/output.txt")) and time.monotonic() < deadline:
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        out, error = running.communicate(timeout=30)
    assert running.returncode == 130, error
    assert "interrupted" in out
    assert out.endswith("slow.py --s 0.1\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("loss: 0.5\n", 0.5),
        ("epoch 1 | train loss=1e-3 | lr 0.1\n", 0.001),
        ("{'loss': 0.25, 'val_loss': 3}\n", 0.25),
        ('{"loss": -.5}\n', -0.5),
        ("loss: 2 loss: 3\nno loss here\n", 3.0),
        ("loss = tensor(0.75, grad_fn=<MeanBackward0>)\n", 0.75),
        ("10%|#  | 1/10 [loss=4]\r20%|#  | 2/10 [loss=5]", 5.0),
        ("loss: 1\nval_loss: 2\nlosses: 3\nlossy=4\nloss 5\n", 1.0),
        ("loss: inf\n", float("inf")),
        ("loss: 1\nloss: info\nloss: nano\n", 1.0),
        ("Loss: 1\n", None),
    ],
)
def test_a_printed_value(text: str, value: float | None) -> None:
    printed = PrintedMetric("loss", lambda _: None)
    with printed.watched():
        for part in text:  # print() writes its arguments one by one
            sys.stdout.write(part)
    assert printed.last == value


def test_each_line_that_ends_is_a_report_and_a_renewed_one_is_none() -> None:
    reported: list[float] = []
    printed = PrintedMetric("loss", reported.append)
    with printed.watched():
        print("loss: 1 loss: 2\nlr: 3")
        for renewed in (4, 5, 6):
            print(f"\rstep {renewed} loss={renewed}", end="", file=sys.stderr)
        print(file=sys.stderr)
        print("loss: 7", end="")
    assert reported == [2.0, 6.0]
    assert printed.last == 7.0


def test_a_script_that_prints_nothing_has_the_value_that_it_logs(search: Search, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "program.py").write_text(
        "import sys\nfrom torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('events')\n"
        "for step in range(3):\n    writer.add_scalar('score', float(sys.argv[2]) * step, step)\n"
    )
    words = ["--trials", "2", "--optimizer", "grid", "--space", "lr=1,2", "--metric", "score", "program.py"]
    status, out, error = search(*words)
    assert status == 0, error
    assert "best: 4, the largest, of trial" in out
