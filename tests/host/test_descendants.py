"""``lagom.host.descendants``: the end of a rank takes along what is its own, and the last one's all the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOST = """
import contextlib, os, signal, subprocess, sys, time
from pathlib import Path
from lagom.host.descendants import adopt_orphans, end_rank

def rank():
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.write(into, subprocess.check_output("sleep 60 >/dev/null 2>&1 & echo $!", shell=True))
        time.sleep(60)
    return pid, int(os.read(out, 20))

def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False

def alive_when_gone(*gone, others=()):
    deadline = time.monotonic() + 20
    while any(map(alive, gone)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [alive(pid) for pid in (*gone, *others)]

adopt_orphans(True)
(first, helper), (second, server) = rank(), rank()
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
end_rank(first, [second])
print(alive_when_gone(helper, others=[second, server]))
end_rank(second, [])
print(alive_when_gone(server, second))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_the_end_of_a_rank_ends_its_own_orphans_and_the_last_ones_end_all() -> None:
    done = subprocess.run([sys.executable, "-c", HOST], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["[False, True, True]", "[False, False]"], done.stderr


WITH_MEMORY = """
import os, signal, subprocess, sys, time
from multiprocessing.resource_tracker import _resource_tracker as tracker
from multiprocessing.shared_memory import SharedMemory
from lagom.host.descendants import adopt_orphans, end_descendants

adopt_orphans(True)
out, into = os.pipe()
if os.fork() == 0:
    memory = SharedMemory(create=True, size=1000)
    os.kill(tracker._pid, signal.SIGSTOP)
    os.write(into, f"{tracker._pid} {memory.name}".encode())
    time.sleep(60)
pid, name = os.read(out, 100).decode().split()
end_descendants()
print(os.path.exists(f"/dev/shm/{name}"))
os.kill(int(pid), signal.SIGCONT)
os.waitpid(int(pid), 0)
print(os.path.exists(f"/dev/shm/{name}"))
"""


@pytest.mark.soak  # the others here remove it in time
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_shared_memory_goes_though_what_removes_it_gets_no_turn_for_long() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_MEMORY], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True", "False"], done.stderr
