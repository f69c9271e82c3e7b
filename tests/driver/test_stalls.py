"""Ranks that get nowhere: named while the run lasts, with their stack and who waits for them; ended in time."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.driver.local import server
from lagom.errors import StallError
from lagom.watch.stall_texts import stall_text
from lagom.wire.messages import Doing, Stalled
from tests.driver.stuck_programs import crossed, skipped, train

# Longer than a busy machine keeps from its turn a rank that is not stuck.
LIMITS: dict[str, Any] = {"stall_timeout_s": 4.0, "timeout_s": 8.5}


def ended(function: Any, **settings: Any) -> StallError:
    config = TorchDistributedConfig(launcher="local", world_size=2, batches="split", **LIMITS, **settings)
    with pytest.raises(StallError) as caught:
        experiment.lagom(function, config)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        pytest.param("sleep", "time.sleep(1000)", marks=pytest.mark.soak),
        pytest.param("loop", "sum(range(", marks=pytest.mark.soak),
        pytest.param("without Python", "pthread_mutex_lock(", marks=pytest.mark.soak),
        ("worker", "time.sleep"),
    ],
)
def test_a_rank_that_is_stuck_is_named_with_its_stack(kind: str, where: str, capfd: pytest.CaptureFixture[str]) -> None:
    error = ended(train, hparams={"kind": kind})
    said = capfd.readouterr().err
    assert error.rank == 1
    assert re.match(r"rank 1 made no progress for \d+ s", str(error))
    place = r"exchange \d+ of \d+ bytes \(gradients\)"
    assert re.search(rf"rank 1 made no progress for \d+ s; rank 0 waits for it in {place}\n", said)
    assert "rank 0 at" in said
    assert "in train: model(batch).mean().backward()" in said
    for text in (said, str(error.__cause__)):
        assert "in train\n" in text
        assert "in never_ends\n" in text
        assert where in text
        assert "lagom/on_rank" not in text
    if kind == "worker":
        assert re.search(r"process \d+, which it started:", said)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("stopped", r"its process \d+ is stopped, by SIGSTOP or a debugger; kill -CONT \d+ on its host lets it go on"),
        pytest.param(
            "device",
            r"its process \d+ waits for a disk or a device, and no signal reaches it \(state D\)",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_process_that_is_stopped_or_waits_for_a_device_is_named_as_such(
    kind: str, state: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)

    def get_stuck() -> None:
        if lagom.rank() == 1:
            if kind == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            # Until the other process has begun its program this one waits in the kernel, as for a device.
            os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, fifo, os.O_RDONLY, 0)])

    error = ended(get_stuck)
    assert error.rank == 1
    assert re.search(rf"^rank 1 made no progress for \d+ s.*; {state}$", str(error))
    assert re.search(f"    rank 1: {state}\n", capfd.readouterr().err)


def test_a_stopped_host_process_is_named_and_ends_the_run_after_the_timeout(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def stops_its_host(folder: str) -> None:
        import subprocess

        subprocess.run(["touch", str(Path(folder, str(os.getpid())))], check=True)  # for real on each rank
        if lagom.rank() == 1:
            os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(1000)

    error = ended(stops_its_host, hparams={"folder": str(tmp_path)})
    text = (
        r"the host process of ranks 0, 1 \(process (\d+)\) has been stopped for \d+ s, by SIGSTOP or a debugger; kill"
    )
    assert error.rank == 0
    found = re.match(text, str(error))
    assert found
    assert re.search(text, capfd.readouterr().err)
    gone = [int(found[1]), *(int(path.name) for path in tmp_path.iterdir())]
    assert len(gone) == 3
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in gone):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_host_process_that_was_stopped_for_a_while_blames_no_rank(capfd: pytest.CaptureFixture[str]) -> None:
    def stops_its_host() -> int:
        import subprocess

        if lagom.rank() == 1:
            host = os.getppid()
            os.kill(host, signal.SIGSTOP)
            subprocess.run(["sleep", "7"], check=True)
            os.kill(host, signal.SIGCONT)
        else:
            time.sleep(7)
        time.sleep(3)  # in which a stall would be shown
        return lagom.rank()

    config = TorchDistributedConfig(launcher="local", world_size=2, stall_timeout_s=6.0)
    assert experiment.lagom(stops_its_host, config).per_rank == (0, 1)
    said = capfd.readouterr().err
    assert "the host process of ranks 0, 1 (process " in said
    assert "goes on again" in said
    assert "made no progress" not in said


def test_a_stopped_fork_server_is_named_and_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    config = TorchDistributedConfig(launcher="local", world_size=1, timeout_s=4.0)
    experiment.lagom(lagom.rank, config)
    stopped = server().process
    stopped.send_signal(signal.SIGSTOP)
    assert experiment.lagom(lagom.rank, config).per_rank == (0,)
    assert f"lagom's fork server on this machine (process {stopped.pid}) has been stopped" in capfd.readouterr().err
    assert stopped.wait(60) == -signal.SIGKILL


@pytest.mark.soak  # below, a rank waits for another in such a program by default
def test_ranks_that_wait_for_each_other_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    error = ended(crossed)
    assert re.search(r"waited for other ranks for \d+ s", str(error))
    assert "dist.recv(" in str(error.__cause__)
    assert re.search(r"ranks 0, 1 waited for other ranks for \d+ s, every one for others\n", capfd.readouterr().err)


@pytest.mark.soak  # tests/host/test_stall_detector.py shows it by default
def test_a_rank_that_was_only_slow_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    def slow() -> int:
        if lagom.rank() == 1:
            time.sleep(5.0)
        return lagom.rank()

    config = TorchDistributedConfig(launcher="local", world_size=2, stall_timeout_s=0.8)
    assert list(experiment.lagom(slow, config).per_rank) == [0, 1]
    assert "time.sleep(5.0)" in capfd.readouterr().err


def test_output_is_progress(capfd: pytest.CaptureFixture[str]) -> None:
    def talks() -> None:
        for number in range(8):
            print(number, flush=True)
            time.sleep(0.6)

    config = TorchDistributedConfig(launcher="local", world_size=1, stall_timeout_s=3.0, timeout_s=3.5)
    experiment.lagom(talks, config)
    assert "no progress" not in capfd.readouterr().err


def _computes(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.soak
def test_a_rank_that_waits_for_processes_which_compute_gets_somewhere(capfd: pytest.CaptureFixture[str]) -> None:
    def hogwild() -> None:
        processes = [multiprocessing.get_context("fork").Process(target=_computes, args=(5.0,)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()

    config = TorchDistributedConfig(launcher="local", world_size=1, stall_timeout_s=3.0, timeout_s=3.5)
    experiment.lagom(hogwild, config)
    assert "no progress" not in capfd.readouterr().err


@pytest.mark.soak  # above, a rank waits for a worker that sleeps by default
def test_a_rank_that_waits_for_a_process_which_sleeps_is_named() -> None:
    def waits() -> None:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
        process.start()
        process.join()

    assert "process.join()" in str(ended(waits))


def stall(
    rank: int, quiet_s: float = 60.0, *, waits: bool = True, stack: str = "", line: str = "", **more: Any
) -> Stalled:
    return Stalled(rank=rank, quiet_s=quiet_s, work=Doing(stack=stack, line=line, waits=waits, **more))


def test_what_is_said_of_many_ranks() -> None:
    stuck = partial(stall, quiet_s=60.2, line="a.py:3, in load: read()", waits=False, stack="  File ...\n")
    waits = partial(stall, quiet_s=59.9, line="a.py:9, in train: loss.backward()")
    text = stall_text({rank: (stuck if rank in (2, 5) else waits)(rank) for rank in range(8)}, 8)
    assert text.splitlines() == [
        "ranks 2, 5 made no progress for 60 s; ranks 0, 1, 3, 4, 6, 7 wait for it",
        "ranks 0, 1, 3, 4, 6, 7 at a.py:9, in train: loss.backward()",
        "ranks 2, 5 at a.py:3, in load: read()",
        "the stack of rank 2:",
        "  File ...",
    ]
    assert stall_text({0: waits(0), 1: waits(1)}, 3).startswith(
        "ranks 0, 1 waited for other ranks for 60 s; rank 2 did not come\n"
    )


def test_the_exchange_is_named_with_its_number_and_who_has_not_come() -> None:
    waits = partial(stall, exchange="all_reduce (sum) of 8 int8", number=4711, missing=[1])
    first = "rank 1 made no progress for 60 s; ranks 0, 2 wait for it in all_reduce 4711 (sum) of 8 int8 (gradients)\n"
    gradients = partial(waits, purpose="gradients")
    assert stall_text({0: gradients(0), 1: stall(1, waits=False), 2: gradients(2)}, 3).startswith(first)
    assert stall_text({0: waits(0), 2: waits(2)}, 4).startswith(
        "ranks 0, 2 waited for other ranks for 60 s in all_reduce 4711 (sum) of 8 int8; rank 1 did not come\n"
    )
    apart = stall_text({0: waits(0), 2: waits(2, number=4712, missing=[0])}, 3)
    assert "rank 0 in all_reduce 4711 (sum) of 8 int8\nrank 2 in all_reduce 4712 (sum) of 8 int8\n" in apart


def test_of_a_program_that_is_distributed_already_the_exchange_is_named_too(capfd: pytest.CaptureFixture[str]) -> None:
    error = ended(skipped)
    assert error.rank == 1
    place = r"all_reduce \d+ \(sum\) of 250 float32"
    assert re.search(rf"rank 1 made no progress for \d+ s; rank 0 waits for it in {place}\n", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"stall_timeout_s": 0}, "stall_timeout_s is 0; want seconds, more than 0, or math.inf"),
        ({"timeout_s": -1.0}, "timeout_s is -1.0; want seconds, more than 0, or None"),
        ({"timeout_s": True}, "timeout_s is True"),
    ],
)
def test_limits_that_cannot_be_are_refused(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=re.escape(found)):
        TorchDistributedConfig(**settings)
