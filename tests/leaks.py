"""Records the state that a test must leave unchanged, before the test, and compares it afterwards."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing.process
import os
import random
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.nn  # torch 2.6 puts a folder on sys.path when this is first imported

with contextlib.suppress(ImportError):
    import cv2  # noqa: F401  # sets LD_LIBRARY_PATH when it is first imported; not needed by tests
# Their Datasets have an initializer, which would stay. An extension may be missing.
with contextlib.suppress(ModuleNotFoundError):
    import lagom.extensions.data.parquet.petastorm_loader
with contextlib.suppress(ModuleNotFoundError):
    import lagom.extensions.search.on_rank.changed_samples  # noqa: F401

State = Mapping[str, Mapping[Any, Any]]
STAYING: set[int | None] = set()
"""Child processes of this process that outlive a test; see tests/rank_processes.py."""


def state() -> State:
    """All that is guarded, by what it is called; cheap enough for every test."""
    return {name: probe() for name, probe in _PROBES.items()}


def leaked(before: State, patience_s: float = 15.0) -> list[str]:
    """Return the differences, a line each, after waiting for threads and processes that are ending."""
    deadline = time.monotonic() + patience_s
    while leaks := _differences(before, state()):
        if time.monotonic() > deadline or not any(name in _GROWING for name in leaks):
            break
        gc.collect()  # some threads, such as those of Spark Connect's client, end with what they serve
        time.sleep(0.02)
    return [f"{name}: {what}" for name, whats in leaks.items() for what in whats]


def seed_generators() -> None:
    """Have torch, numpy and random draw the same numbers from now on."""
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


def rng_state() -> tuple[bytes, str, str]:
    """The states of torch's, numpy's and random's generators, comparable with ``==``."""
    return torch.get_rng_state().numpy().tobytes(), repr(numpy.random.get_state()), repr(random.getstate())


def shared_memory_files() -> set[str]:
    """Return the names in /dev/shm, without those that Python and torch make for other tests."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "psm_", "torch_"))}


def _differences(before: State, after: State) -> dict[str, list[str]]:
    changed = {}
    for name in before:
        old, new = before[name], after[name]
        if old == new:
            continue
        added = [f"{key} is left" for key in new if key not in old]
        gone = [f"{key} is gone" for key in old if key not in new]
        other = [f"{key} is changed" for key in old if key in new and old[key] != new[key]]
        if whats := added if name in _GROWING else added + gone + other:
            changed[name] = whats
    return changed


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in _OTHERS}


def _threads() -> dict[str, bool]:
    client = sys.modules.get("pyspark.sql.connect.client.reattach")
    pool = (
        getattr(vars(client).get("ExecutePlanResponseReattachableIterator"), "_release_thread_pool_instance", None)
        if client
        else None
    )
    kept = getattr(pool, "_threads", ())  # PySpark 4.1's client keeps one pool for all sessions
    return {f"{thread.name} ({thread.ident})": True for thread in threading.enumerate() if thread not in kept}


def _processes() -> dict[str, bool]:
    found = dict[str, bool]()
    _add_children(os.getpid(), "python", found)
    return found


def _add_children(pid: int, command: str, found: dict[str, bool]) -> None:
    for child in {int(pid) for task in _tasks(pid) for pid in _read(task / "children").split()} - STAYING:
        child_command = _read(Path(f"/proc/{child}/cmdline")).replace("\0", " ").strip()
        # No command line: it has ended, and its parent has not asked for its exit status yet.
        if child_command and not _stays(command, child_command):
            found[f"{child} {child_command[:120]}"] = True
        # A worker of Spark's is forked from its daemon, so bears the same command line; its own children are ranks.
        forked = child_command == command
        _add_children(child, "a worker" if forked else child_command, found)


def _stays(parent: str, child: str) -> bool:
    """Whether a process stays from one call to the next by design; what the fork server or a worker forks does not."""
    if any(server in parent for server in _SERVERS):
        return False
    return any(command in child for command in (_SERVERS if parent == "a worker" else _WARM))


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _process() -> dict[str, object]:
    return {
        "working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "umask": _umask(),
        "torch threads": torch.get_num_threads(),
        "torch default dtype": torch.get_default_dtype(),
        "torch gradients": torch.is_grad_enabled(),
        "torch default process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
    }


def _umask() -> str:
    # os.umask() can only be read by setting it.
    lines = _read(Path("/proc/self/status")).splitlines()
    return next((line for line in lines if line.startswith("Umask")), "")


def _signals() -> dict[str, object]:
    # SIGALRM is pytest-timeout's.
    return {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS}


def _patches() -> dict[str, object]:
    return {
        f"{getattr(owner, '__module__', '')}.{owner.__name__}.{key}": value
        for owner in _PATCHABLE
        for key, value in vars(owner).items()
        if key not in _LAZY
    } | {f"{module.__name__}.{name}": getattr(module, name) for module, name in _FUNCTIONS}


def _initializers() -> dict[type, object]:
    todo, found = [torch.utils.data.Dataset], dict[type, object]()
    while todo:
        owner: type = todo.pop()
        found[owner] = vars(owner).get("__init__")
        todo += owner.__subclasses__()
    return found


_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
"""Environment variables that pytest, and torch when it first builds an optimizer, set."""
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGPIPE")
_PATCHABLE: tuple[type, ...] = (
    torch.utils.data.DataLoader,
    torch.utils.data.dataloader._BaseDataLoaderIter,
    torch.utils.data.dataloader._SingleProcessDataLoaderIter,
    torch.utils.data.dataloader._MultiProcessingDataLoaderIter,
    torch.utils.data.Dataset,
    torch.utils.data.DistributedSampler,
    torch.nn.Module,
    torch.nn.Parameter,
    torch.Tensor,
    torch.optim.Optimizer,
)
_LAZY = {"__doc__", "__slotnames__", "__annotations__", "__annotations_cache__", "__annotate_func__", "_abc_impl"}
"""Attributes that Python itself fills in when they are first asked for."""
_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (torch, "save"),
    (torch, "load"),
    (torch, "compile"),
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (torch.distributed, "init_process_group"),
    (torch.distributed.distributed_c10d, "init_process_group"),
    (torch.multiprocessing, "spawn"),
    (multiprocessing.process.BaseProcess, "start"),
    (sys, "excepthook"),
    (urllib.request, "urlretrieve"),
)
_SERVERS = ("lagom.host.fork_server", "lagom/spark/start_server")
_WARM = (
    *_SERVERS,
    "java",
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "pyspark.daemon",
)
"""Command lines of what may stay: Spark's JVM, its Python daemon and workers, Python's and lagom's fork servers."""
_GROWING = {"thread", "child process", "Dataset initializer"}
"""Kinds of state of which a test may remove items, but not add any."""


def _module_of_the_program() -> Mapping[str, int]:
    """Return which module is ``__main__``: processes that are spawned run its file."""
    return {"__main__": id(sys.modules["__main__"])}


_PROBES: dict[str, Callable[[], Mapping[Any, Any]]] = {
    "module": _module_of_the_program,
    "environment variable": _environment,
    "thread": _threads,
    "child process": _processes,
    "process": _process,
    "signal handler": _signals,
    "attribute": _patches,
    "Dataset initializer": _initializers,
}
