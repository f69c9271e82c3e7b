"""``TrialImports``: a slot imports the libraries that a trial has imported; later trials then find them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from lagom.on_rank.rank_environment import set_environment
from lagom.on_rank.rank_process import die_with
from lagom.random_states import equal_random_states, random_states
from lagom.wire.spec import RunSpec

_MANY = 40
"""Number of modules from which importing them before the fork pays: a few hundred take a second in each trial."""
_LIMIT_S = 60
_JEMALLOC = "jemalloc_bg_thd"
"""Name of the thread of jemalloc, the allocator in pyarrow, which does its work itself in a fork."""


class TrialImports:
    """Imports modules into this process, from which trials are forked, if that leaves it fit for forking.

    The constructor gives the process the environment variables of ``spec``, which trials have too: libraries read them
    when they are imported.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._tried: set[str] = set()
        self._names: list[str] = []
        self._child: int | None = None
        """Process that tries to import ``_names``."""
        set_environment(spec.env, only=spec.whole_env)

    @property
    def pids(self) -> list[int]:
        """The process that tries to import modules, if it has not ended."""
        return [self._child] if self._child is not None else []

    def try_out(self, names: Sequence[str]) -> None:
        """Import ``names``, modules of installed packages that a trial has imported, in a child, while a trial runs.

        Do nothing if fewer than ``_MANY`` modules are new, or a child is still at it. No module is tried twice.
        """
        new = [name for name in names if name not in sys.modules and name not in self._tried]
        if self._child is None and len(new) >= _MANY:
            self._tried.update(new)
            self._names = new
            with contextlib.suppress(OSError):  # there is no memory or process left
                self._child = _fork_to_try(new)

    def add(self) -> bool:
        """Import the modules that a child has imported without harm; return whether this was done.

        If the child crashed, took more than ``_LIMIT_S``, drew random numbers or started threads (which do not survive
        a fork), this process imports nothing, and the trials import the modules themselves. So they do as long as the
        child runs. A module whose import raises an error is left out.
        """
        if self._child is None:
            return False
        try:
            pid, status = os.waitpid(self._child, os.WNOHANG)
        except ChildProcessError:  # another part of this process has awaited it
            pid, status = self._child, 1
        if pid == 0:
            return False
        self._child = None
        if status:
            return False
        from lagom.host.preload import look_at_loaded  # imports torch, which an executor may lack

        _import(self._names)
        look_at_loaded()
        gc.collect()
        gc.freeze()
        return True


def _fork_to_try(names: Sequence[str]) -> int:
    """Fork a child that imports ``names``; its status is 0 if it then has no other thread, and drew no random numbers.

    Return its process id.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which this process does not have
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_LIMIT_S)
            die_with(parent)
            before = random_states()
            _import(names)
            code = 0 if len(_threads()) == 1 and equal_random_states(random_states(), before) else 1
        finally:
            os._exit(code)
    return pid


def _threads() -> list[str]:
    """Return the names of this process's threads, without those that start again by themselves after a fork."""
    names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if name != _JEMALLOC]


def _import(names: Sequence[str]) -> None:
    """Import ``names`` without output; leave out what cannot be imported here."""
    quiet, kept = os.open(os.devnull, os.O_WRONLY), (os.dup(1), os.dup(2))
    try:
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        for name in names:
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
    finally:
        for fd, target in zip(kept, (1, 2), strict=True):
            os.dup2(fd, target)
        for fd in (quiet, *kept):
            os.close(fd)
