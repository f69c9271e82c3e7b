"""Any process of a run may be killed, at any time: its processes, files, sockets and shared memory are gone."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GONE_S = 30.0  # a fork server that is still importing torch on a busy machine; a second or two else
LIMIT_S = 100.0  # for all four kills on a busy machine: what is left is said before, and 120 s would end pytest
DRIVER = """
import multiprocessing, os, subprocess, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.driver import local

def train():
    resource_tracker.ensure_running()  # memory made before it is left by a kill in any run
    memory = SharedMemory(create=True, size=1000, name=f"{os.environ['LGK_MEMORY']}-{os.getpid()}")
    pool = multiprocessing.get_context("fork").Pool(2)
    apart = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    apart.start()
    listener = multiprocessing.connection.Listener(family="AF_UNIX")
    alone = subprocess.Popen(["sleep", "600"], start_new_session=True)
    left = subprocess.run("(sleep 600 &) & sleep 0", shell=True, start_new_session=True)
    memory_in_use = SharedMemory(name=memory.name)
    time.sleep(600)

for line in sys.stdin:
    print("server", local.server().process.pid, flush=True)
    try:
        experiment.lagom(train, TorchDistributedConfig(launcher="local", world_size=2, run_dir="", max_failures=0))
    except Exception as error:
        print("ended", type(error).__name__, flush=True)
"""


class Runs:
    """A driver that begins a run when told, with temporary files in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = f"LGK_MEMORY=psm_{folder.name}"
        self.process = self._started()
        self.server = 0

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ
            | {"TMPDIR": str(self.folder), "LGK_MEMORY": f"psm_{self.folder.name}", "OMP_NUM_THREADS": "1"}
            | {"TORCHINDUCTOR_CACHE_DIR": "/tmp"},  # which torch makes wherever it is imported, and keeps
        )

    def begin(self) -> None:
        """Have a run begin; a driver that was killed is started anew."""
        if self.process.poll() is not None:
            self.process.communicate()
            self.process = self._started()
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.server = int(self.heard(60.0).split()[1])

    def wait(self) -> None:
        """Wait until both ranks have started all their processes."""
        assert within(60.0, lambda: len(self.pids_with("sleep")) >= 4 and len(self.shared()) >= 2)
        time.sleep(0.5)

    def host(self) -> int:
        """The host process of the run."""
        return children(self.server)[0]

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks."""
        return children(self.host())

    def victims(self) -> list[int]:
        """List whom to kill: all but Python's resource trackers, without which a plain run leaves its memory too."""
        pids = [pid for pid in self.pids() if b"resource_tracker" not in read(f"/proc/{pid}/cmdline")]
        return [self.process.pid, self.server, *sorted(pids)]

    def heard(self, seconds: float = GONE_S) -> str:
        """Return the driver's next line of output; "" if none comes in time."""
        assert self.process.stdout is not None
        there, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline().strip() if there else ""

    def pids(self) -> list[int]:
        """All processes that there are of it, by the variable that all inherit, but driver and fork server."""
        kept = {self.process.pid, self.server} if self.process.poll() is None else set[int]()
        found = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return [pid for pid in found if pid not in kept and self.marker.encode() in read(f"/proc/{pid}/environ")]

    def pids_with(self, name: str) -> list[int]:
        """Return the processes of the run that execute the program ``name``."""
        return [pid for pid in self.pids() if read(f"/proc/{pid}/comm") == f"{name}\n".encode()]

    def shared(self) -> list[str]:
        """Shared memory that ranks have made."""
        return [name for name in os.listdir("/dev/shm") if name.startswith(f"psm_{self.folder.name}")]

    def left(self) -> list[str]:
        """List the processes, files and shared memory that the run has left."""
        processes = [f"{pid} {read(f'/proc/{pid}/cmdline').decode()[:80]}" for pid in self.pids()]
        base = str(self.folder / f"lagom-{os.getuid()}")
        files = [f"{top}/{name}" for top, folders, names in os.walk(self.folder) for name in (*folders, *names)]
        files = [path for path in files if path != base]
        return processes + files + self.shared()

    def remains(self) -> list[str]:
        """List what there is of the run when it has had the time to end."""
        within(GONE_S, lambda: not self.left())
        return self.left()

    def close(self) -> None:
        """End the driver."""
        self.process.kill()
        self.process.communicate()


def within(seconds: float, true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def children(pid: int) -> list[int]:
    return sorted(int(child) for child in read(f"/proc/{pid}/task/{pid}/children").split())


def read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


@pytest.fixture
def runs() -> Iterator[Runs]:
    folder = Path(tempfile.mkdtemp(prefix="lgk", dir="/tmp"))  # sockets want a short path
    runs = Runs(folder)
    yield runs
    runs.close()
    within(5.0, lambda: not runs.pids())
    for pid in runs.pids():
        os.kill(pid, signal.SIGKILL)
    for name in runs.shared():
        os.unlink(f"/dev/shm/{name}")
    shutil.rmtree(folder)


@pytest.mark.soak  # test_local.py and test_attempts.py kill each of these by default
@pytest.mark.timeout(LIMIT_S)
def test_whatever_is_killed_nothing_is_left(runs: Runs) -> None:
    killed: dict[str, Callable[[], int]] = {
        "rank": lambda: runs.ranks()[1],
        "host process": runs.host,
        "fork server": lambda: runs.server,
        "driver": lambda: runs.process.pid,
    }
    for name, pid in killed.items():
        runs.begin()
        runs.wait()
        os.kill(pid(), signal.SIGKILL)
        if name != "driver":
            assert runs.heard() == "ended RankError", name
        else:
            runs.process.wait()
        assert runs.remains() == [], name


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(10))
def test_50_random_kills_leave_nothing(runs: Runs, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(5):
        runs.begin()
        if draw.random() < 0.8:  # else while torch is still imported, for as long as that takes
            within(60.0, lambda: bool(children(runs.server)))
        time.sleep(draw.uniform(0.0, 4.0))
        pid = draw.choice(runs.victims())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if pid == runs.process.pid or not runs.heard(5.0):  # where that was one that a run can do without
            runs.process.kill()
            runs.process.wait()
        assert runs.remains() == [], number
