"""``check_process``: finds obstacles to a fork of this process: what the fork would lose, or share with the process.

Other functions here remove obstacles: threads of OpenMP, threads that can be started again, batches of ended workers.

Only the thread that forks goes on in the fork. See Note [Sleeping twins] in sleeping_twin.py.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lagom.restart.open_files import NoTwinError

_SHARED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .w.s \S+ \S+ \d+ +(.*)")
"""A writable mapping that a fork shares, as the kernel lists it: where it begins and ends, and its file."""
_BATCH = re.compile(r"/dev/shm/torch_(\d+)_\S* \(deleted\)|/memfd:lagom-batch \(deleted\)")
"""Matches files of tensors that a process has shared, with the process's id; and a twin's copies of such files."""
_OURS = "/memfd:lagom"
_SEMAPHORE = "/dev/shm/sem."
_RESTARTED = {"TMonitor", "_AsyncWriterThread"}
"""Classes of threads that are started again: of tqdm's bars, and of TensorBoard's writers."""
_FEEDER, _FEEDER_S = "QueueFeederThread", 0.05
"""Name of threads of a loader's queues, which end soon after its workers, and the seconds to wait for their end."""
OF_JEMALLOC = "jemalloc_bg_thd"
"""Name of the thread of jemalloc, the allocator in pyarrow, which does its work itself in a fork."""
_ENDING_TRIES, _ENDING_S = 5, 0.001
"""Number of looks, and seconds between two: the system lists a thread for a moment after it has ended."""
_HARD = 2  # omp_pause_hard
_MAP_FIXED = 0x10
_OPENMP = re.compile(r"/lib[gi]?omp[^/]*\.so[^/]*$")


def check_process(threads: Collection[int | None], children: Sequence[int]) -> bool:
    """Check that a fork of this process can go on in its place.

    Args:
        threads: the system's ids of lagom's own threads.
        children: ids of the process's children.

    Returns:
        Whether the fork has to ``copy_batches``.

    Raises:
        NoTwinError: if it cannot.
    """
    if children:
        raise NoTwinError("the program has child processes")
    for thread in threading.enumerate():
        if thread.name == _FEEDER:
            thread.join(_FEEDER_S)
            if not thread.is_alive():
                continue
        if thread is not threading.main_thread() and thread.native_id not in threads and not is_restarted(thread):
            raise NoTwinError(f"the program has a thread, {thread.name}")
    for module in ("mlflow", "wandb"):
        if module in sys.modules:
            raise NoTwinError(f"the program uses {module}")
    if any(signal.getitimer(timer)[0] for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF, signal.ITIMER_VIRTUAL)):
        raise NoTwinError("the program has set a timer")
    return _check_memory()


def has_hidden_threads(threads: Collection[int | None]) -> bool:
    """Return whether a fork would miss threads of this process: not Python's, not in ``threads``, not jemalloc's."""
    known = {thread.native_id for thread in threading.enumerate()} | {*threads, os.getpid()}
    for _ in range(_ENDING_TRIES):
        if all(int(task) in known or _name(task) in ("", OF_JEMALLOC) for task in os.listdir("/proc/self/task")):
            return False
        time.sleep(_ENDING_S)
    return True


def _name(task: str) -> str:
    """Return the name of a thread of this process; "" if it has ended."""
    try:
        return Path("/proc/self/task", task, "comm").read_text().strip()
    except OSError:
        return ""


def end_openmp_threads() -> None:
    """End the threads of OpenMP, which begin again when they are needed: in a fork, the first use would hang."""
    for library in _openmp():
        library.omp_pause_resource_all(_HARD)


def restart_threads() -> None:
    """Let tqdm's next bar start tqdm's thread again, which a fork lacks, and give tqdm a lock of its own."""
    bars: Any = sys.modules.get("tqdm.std")
    if bars is not None:
        bars.tqdm.monitor = None  # the next bar starts another
        if getattr(bars.TqdmDefaultWriteLock, "mp_lock", None) is not None:
            # The process before may have ended while it held the lock, which is in memory that both share.
            del bars.TqdmDefaultWriteLock.mp_lock
            bars.tqdm.set_lock(bars.TqdmDefaultWriteLock())


def is_restarted(thread: threading.Thread) -> bool:
    """Return whether ``thread`` belongs to a bar or writer, which starts it again in another process."""
    return type(thread).__name__ in _RESTARTED and type(thread).__module__.startswith(("tqdm.", "tensorboard."))


def _check_memory() -> bool:
    """Return whether this process shares memory with batches of ended workers.

    Raises:
        NoTwinError: if it shares other memory.
    """
    has_batches = False
    bars: Any = sys.modules.get("tqdm.std")
    num_semaphores = int(bars is not None and getattr(bars.TqdmDefaultWriteLock, "mp_lock", None) is not None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = _SHARED.match(line) if line[20:50].find("s ") >= 0 else None
        if found is None:
            continue
        batch = _BATCH.match(found[3])
        if batch is None and found[3].startswith(_OURS):
            continue
        if found[3].startswith(_SEMAPHORE) and num_semaphores:
            num_semaphores -= 1
            continue
        if batch is None or os.path.exists(f"/proc/{batch[1]}"):
            raise NoTwinError(f"the program shares memory, {found[3]}")
        has_batches = True
    return has_batches


def copy_batches() -> None:
    """Replace batches of workers that have ended by copies, in a fork that would else share them with the rank."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = _SHARED.match(line)
        if found is not None and _BATCH.match(found[3]):
            _copy_memory(int(found[1], 16), int(found[2], 16))


def _copy_memory(begin: int, end: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    content, file = ctypes.string_at(begin, end - begin), os.memfd_create("lagom-batch")
    os.ftruncate(file, len(content))
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(begin, len(content), mmap.PROT_READ | mmap.PROT_WRITE, flags, file, 0) != begin:
        raise OSError("a worker's batch could not be copied")
    ctypes.memmove(begin, content, len(content))
    os.close(file)


def _openmp() -> list[ctypes.CDLL]:
    return [ctypes.CDLL(path) for path in _openmp_paths(len(sys.modules))]


@functools.lru_cache(maxsize=1)
def _openmp_paths(num_modules: int) -> tuple[str, ...]:
    """Return OpenMP's libraries; ``num_modules`` is the key of the cache, since each import may load more of them."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    return tuple(sorted(path for path in paths if _OPENMP.search(path)))
