"""``lagom.host.end_reports``: a rank that the system killed as memory ran out is told from one that somebody killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lagom.host.end_reports import num_kills, oom_kill_text

GROUPS = Path("/sys/fs/cgroup")


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        ("0::/job\n", "job/memory.events"),
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
        ("9:cpu,memory:/job\n", "memory/job/memory.oom_control"),
        ("4:memory:/of/the/host\n", "memory/memory.oom_control"),
    ],
)
def test_kills_are_counted_in_both_versions_of_control_groups(tmp_path: Path, groups: str, file: str) -> None:
    proc, root = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    assert num_kills(root, proc) == {}
    (proc / "vmstat").write_text("nr_free_pages 3\noom_kill 5\nnr_x 1\n")
    assert num_kills(root, proc) == {"machine": 5}
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("low 0\nunder_oom 0\noom 9\noom_kill 2\noom_group_kill 0\n")
    assert num_kills(root, proc) == {"container": 2, "machine": 5}


def test_what_is_said_of_it() -> None:
    none = {"container": 1, "machine": 4}
    assert "limit of this container" in oom_kill_text(none, {"container": 2, "machine": 5})
    assert "this machine's memory ran out" in oom_kill_text(none, {"container": 1, "machine": 5})
    sent = ", which a person or a cluster manager has sent: this machine did not run out of memory"
    assert oom_kill_text(none, none) == sent
    assert oom_kill_text({}, none) == oom_kill_text({}, {}) == ", as the system does when memory runs out"


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 1 GB."""
    second = (GROUPS / "cgroup.controllers").exists()
    made = (GROUPS if second else GROUPS / "memory") / f"lagom-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(1 << 30))
    except OSError:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip("no control groups may be made here")
    yield made
    deadline = time.monotonic() + 10
    while made.exists():  # the system takes a moment to let go of processes that are gone
        with contextlib.suppress(OSError):
            made.rmdir()
        assert time.monotonic() < deadline
        time.sleep(0.05)


PROGRAM = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from lagom import experiment
from lagom.config import TorchDistributedConfig
import lagom

def train():
    if lagom.rank() == 1:
        held = [bytearray(b"x") * (64 << 20) for _ in range(40)]
    else:
        import time
        time.sleep(50)

experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=2, run_dir=None, max_failures=0))
"""


@pytest.mark.soak
def test_a_rank_that_takes_too_much_is_named_with_the_reason(group: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(group)], capture_output=True, text=True, timeout=170, check=False
    )
    said = (
        "RankError: rank 1 was killed by SIGKILL, by the system, as memory ran out within the limit of this container"
    )
    assert said in done.stderr, done.stderr
