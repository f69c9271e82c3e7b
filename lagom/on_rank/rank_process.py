"""The forked process of one rank: detaches from its parent, runs, writes its outcome to a file, and ends."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import logging
import multiprocessing
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from lagom.on_rank.rank_call import RankCall
from lagom.on_rank.rank_environment import set_environment
from lagom.on_rank.stack_dump import dump_on_signal
from lagom.watch.messages import OWN, OWN_NOTICE
from lagom.wire.framing import shorten
from lagom.wire.messages import Log
from lagom.wire.spec import RankSpec, RunSpec

if TYPE_CHECKING:
    from lagom.host.workspace import HostWorkspace

_PR_SET_PDEATHSIG = 1
_MAX_SOCKET = 107  # most characters of a Unix socket's path


def run_rank(
    spec: RunSpec, rank_spec: RankSpec, workspace: HostWorkspace, stdout: int, stderr: int, parent: int
) -> NoReturn:
    """Run the rank of ``rank_spec`` in a process just forked from ``parent``; never return."""
    code = 1
    try:
        _detach(rank_spec, workspace, stdout, stderr, parent)
        _adopt_driver_settings(spec, rank_spec, workspace)
        log = _separate_log(rank_spec.rank)
        call = RankCall(spec, rank_spec)
        log.tell = call.tell
        call.run()
    except BaseException:
        # No exception may propagate into the frames of the parent process, which the fork has copied.
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _detach(rank_spec: RankSpec, workspace: HostWorkspace, stdout: int, stderr: int, parent: int) -> None:
    gc.disable()  # objects of the parent, such as its sockets, must not be finalised here
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    die_with(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    own_fds = {rank_spec.control_fd, rank_spec.outcome_fd, rank_spec.store_fd, rank_spec.stacks_fd}
    close_all_but({0, 1, 2, workspace.payload_fd, rank_spec.notice_fd, rank_spec.sigterm_fd, *own_fds})
    streams: dict[str, io.TextIOBase] = {"stdin": open(0, closefd=False)}  # noqa: SIM115
    for fd, name in ((1, "stdout"), (2, "stderr")):
        raw = open(fd, "wb", closefd=False)  # noqa: SIM115
        streams[name] = _Output(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    atexit._clear()
    gc.freeze()
    gc.enable()


class _Output(io.TextIOWrapper):
    """A standard stream that records whether its last line is unfinished."""

    is_in_line = False

    def write(self, text: str, /) -> int:
        """Write ``text`` as a text file does."""
        if text:
            self.is_in_line = not text.endswith("\n")
        return super().write(text)


class _OwnLines(logging.StreamHandler):  # type: ignore[type-arg]  # which Python 3.10 cannot subscript
    """Log handler that sends lagom's messages to the driver; in forks of the rank, writes them to standard error.

    A message in standard error begins on a new line if the program's last line is unfinished, as with progress bars.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.tell: Callable[[Log], None] | None = None
        self._rank = rank
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Send ``record``, or write it."""
        if self.tell is None or os.getpid() != self._pid:
            super().emit(record)
            return
        for file in (sys.__stdout__, sys.__stderr__):  # output from before this message must reach the driver first
            if file is not None:
                file.flush()
        text = logging.StreamHandler.format(self, record).encode(errors="backslashreplace")
        stream = OWN_NOTICE if getattr(record, "is_notice", False) else OWN
        self.tell(Log(rank=self._rank, stream=stream, data=shorten(text.decode("latin-1")) + "\n"))

    def format(self, record: logging.LogRecord) -> str:
        """Format ``record``; put a line break before it if the stream's line is unfinished."""
        text = super().format(record)
        return f"\n{text}" if getattr(self.stream, "is_in_line", False) else text


def die_with(parent: int) -> None:
    """Make the kernel kill this process when ``parent``, its parent, ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl took effect
            os._exit(1)


def close_all_but(keep: set[int | None]) -> None:
    """Close all descriptors of this process except those in ``keep``; None entries are ignored."""
    kept = sorted(fd for fd in keep if fd is not None)
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


def _adopt_driver_settings(spec: RunSpec, rank_spec: RankSpec, workspace: HostWorkspace) -> None:
    """Set the driver's environment, working directory, module path and arguments; make a new, empty ``__main__``."""
    set_environment(spec.env, only=spec.whole_env)
    os.chdir(workspace.cwd)
    own = [sys.path[0]]  # the entry that has lagom; see Note [Worker reuse] in spark/spark_task.py
    sys.path[:] = own + [entry for entry in (*workspace.sys_path, *sys.path[1:]) if entry not in own]
    sys.path += [workspace.packages] if workspace.packages else []
    importlib.invalidate_caches()
    sys.argv[:] = spec.argv
    sys.modules["__main__"] = types.ModuleType("__main__")
    _keep_sockets(f"{rank_spec.host_dir}/mp-{rank_spec.rank}")
    faulthandler.enable(file=2)
    if rank_spec.stacks_fd is not None:
        dump_on_signal(rank_spec.stacks_fd)


def _keep_sockets(folder: str) -> None:
    """Let multiprocessing make its sockets in ``folder``, which is removed with the run however processes end.

    Change nothing if the paths of sockets would be too long there.
    """
    if len(folder) <= _MAX_SOCKET - len("/listener-12345678"):
        os.mkdir(folder, 0o700)
        # There is no public setting for this folder. Child processes of every start method inherit this private one.
        config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        config["tempdir"] = folder


def _separate_log(rank: int) -> _OwnLines:
    """Keep lagom's messages out of the program's log files and off its standard output."""
    handler = _OwnLines(rank)
    handler.setFormatter(logging.Formatter("lagom: %(message)s"))
    logger = logging.getLogger("lagom")
    logger.handlers[:] = [handler]
    logger.propagate = False
    return handler
