"""SIGTERM to a rank, to its host process, or to all processes of a run: a last snapshot, and nothing is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import RankError
from lagom.on_rank.resource_usage import children
from tests.driver import losses
from tests.extensions.resume import test_termination as termination
from tests.integration.test_attempts import parent

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the columns of code")
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """What the program prints last, and its batches, when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    output = termination.start(folder, "--snapshot-every", "1000").communicate(timeout=PATIENCE_S)[0]
    return output.splitlines()[-1], list(termination.lines(folder))


RESTORING = termination.PROGRAM.replace(
    "torch.manual_seed(3)",
    """torch.manual_seed(3)
import signal
signal.signal(signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: None))""",
)
"""The program, which has a handler of its own for a moment."""
DRAW = random.Random(7)
MOMENTS = DRAW.sample(range(1, termination.NUM_BATCHES - 20), 40)  # a busy machine must not end the run before


def rank_of(folder: Path, number: int) -> int:
    """Return the process of a rank."""
    return int(losses.ranks(folder / "runs")[str(number)]["pid"])


def below(pid: int) -> Iterator[int]:
    """Yield all processes that ``pid`` and its children have started."""
    for child in children(pid):
        yield child
        yield from below(child)


CASES = [
    pytest.param(moment, victim, marks=[pytest.mark.soak] * (place not in (0, 2)))
    for place, (moment, victim) in enumerate(zip(MOMENTS[:20], ["rank 0", "rank 1", "the process"] * 7, strict=False))
]


@pytest.mark.parametrize(("moment", "victim"), CASES)
def test_a_run_continues_from_the_next_batch_when_a_process_receives_sigterm(
    undisturbed: tuple[str, list[str]], tmp_path: Path, moment: int, victim: str
) -> None:
    folder = tmp_path / "run"
    program = RESTORING if victim == "rank 0" else termination.PROGRAM
    process = termination.start(folder, "--snapshot-every", "1000", program=program)
    noted = termination.wait_for(moment, folder, process)
    rank = rank_of(folder, 0 if victim == "rank 0" else 1)
    os.kill(pid := parent(rank) if victim == "the process" else rank, signal.SIGTERM)
    if victim == "the process":  # a batch system may signal a process, and then its group
        time.sleep(0.02)
        os.kill(pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert (output.splitlines()[-1], list(termination.lines(folder))) == undisturbed
    who = "the process that holds ranks 0, 1" if victim == "the process" else victim
    found = re.search(rf"{who} received SIGTERM \(on .*\); the run continues from batch (\d+) of epoch (\d+)", errors)
    assert found is not None, errors
    assert 24 * (int(found[2]) - 1) + int(found[1]) >= noted  # nothing is computed again that came before the signal
    (failure,) = json.loads(next(folder.glob("runs/*/run.json")).read_text())["failures"]
    assert failure["cause"] == f"{who} received SIGTERM"


@pytest.mark.parametrize(
    "moment",
    [pytest.param(moment, marks=[pytest.mark.soak] * (place > 0)) for place, moment in enumerate(MOMENTS[20:])],
)
def test_a_run_all_of_whose_processes_receive_sigterm_ends_and_continues_from_the_next_batch(
    undisturbed: tuple[str, list[str]], tmp_path: Path, moment: int
) -> None:
    """As when a service of systemd ends."""
    folder = tmp_path / "run"
    process = termination.start(folder, "--snapshot-every", "1000")
    noted = termination.wait_for(moment, folder, process)
    for pid in [*below(process.pid), process.pid]:
        os.kill(pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    (run,) = (folder / "runs").iterdir()
    found = re.search(rf"ended by SIGTERM; lagom resume {run} continues from batch (\d+) of epoch (\d+)\n", errors)
    assert found is not None, errors
    assert 24 * (int(found[2]) - 1) + int(found[1]) >= noted
    resumed = termination.lagom("resume", str(run))
    output, errors = resumed.communicate(timeout=PATIENCE_S)
    assert resumed.returncode == 0, errors
    assert (output.splitlines()[-1], list(termination.lines(folder))) == undisturbed


WRITING_SLOWLY = termination.PROGRAM.replace(
    "torch.manual_seed(3)",
    """torch.manual_seed(3)
class Slow:
    def __getstate__(self):
        open(f"{folder}/writing", "w").close()
        time.sleep(1)
        return {"is_slow": True}
slow = Slow()""",
)


def test_a_snapshot_that_is_being_written_is_finished_when_all_processes_receive_sigterm(
    undisturbed: tuple[str, list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = termination.start(folder, "--snapshot-every", "0.1", program=WRITING_SLOWLY)
    losses.wait_for((folder / "writing").exists)
    for pid in [*below(process.pid), process.pid]:
        os.kill(pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "the process that wrote it was killed" not in errors
    (run,) = (folder / "runs").iterdir()
    assert f"lagom resume {run} continues from batch " in errors
    output, errors = termination.lagom("resume", str(run)).communicate(timeout=PATIENCE_S)
    assert (output.splitlines()[-1], list(termination.lines(folder))) == undisturbed, errors


def run(function: Any, folder: Path, **settings: Any) -> Any:
    config: dict[str, Any] = {"launcher": "local", "world_size": 1, "snapshot_every_s": 1000, **settings}
    hparams = {"folder": str(folder)}
    return experiment.lagom(function, TorchDistributedConfig(run_dir=folder / "runs", hparams=hparams, **config))


def sleeping() -> None:
    """Wait longer than the test."""
    time.sleep(PATIENCE_S)


def look(folder: str) -> dict[str, Any]:
    """Return what a program sees of SIGTERM: its handler, its children's ends, and its own handler."""
    seen: dict[str, Any] = {"is default": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL}
    child = multiprocessing.get_context("fork").Process(target=sleeping)
    child.start()
    time.sleep(0.3)
    child.terminate()
    child.join(PATIENCE_S)
    seen["child"] = child.exitcode
    command = subprocess.Popen(["sleep", "300"])
    command.terminate()
    seen["command"] = command.wait(PATIENCE_S)
    calls: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    forked = os.fork()
    if forked == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7 if len(calls) == 2 else 8)
    return {**seen, "own": calls, "fork": os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])}


def test_a_program_sees_nothing_of_it(tmp_path: Path) -> None:
    result = run(look, tmp_path)
    assert result.value == {
        "is default": True,
        "child": -signal.SIGTERM,
        "command": -signal.SIGTERM,
        "own": [signal.SIGTERM],
        "fork": 7,
    }
    assert result.failures == []


WAYS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "killpg": lambda: os.killpg(os.getpgrp(), signal.SIGTERM),
    "raise_signal": lambda: signal.raise_signal(signal.SIGTERM),
}


def end_itself(folder: str, way: str) -> None:
    """End this process, and do something more if that has not ended it."""
    WAYS[way]()
    Path(folder, "went on").touch()


@pytest.mark.parametrize("way", ["kill", *(pytest.param(way, marks=pytest.mark.soak) for way in WAYS if way != "kill")])
def test_a_program_that_sends_sigterm_to_itself_ends_there(way: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 0 was killed by SIGTERM"):
        run(lambda folder: end_itself(folder, way), tmp_path, max_failures=0)
    assert not (tmp_path / "went on").exists()
