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
import socket
import sys
import threading
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lagom.call import Call
from lagom.errors import CollectiveError, PayloadError
from lagom.payload import InParts, Parcel, classes_received, unpack, unpack_file
from lagom.wire.client import DriverClient, Message
from lagom.wire.spec import RankSpec, RunSpec
from lagom.worker.heartbeat import Heartbeat
from lagom.worker.stack_dump import dump_on_signal
from lagom.world import Place, rank_calls_reported

if TYPE_CHECKING:
    from lagom.host.workspace import HostWorkspace
    from lagom.session.session import Session

_PR_SET_PDEATHSIG = 1
_MAX_SOCKET = 107  # characters of a socket's path
_MAX_TEXT = 200_000  # characters of a traceback; a longer one does not fit into a frame


def run_rank(spec: RunSpec, seat: RankSpec, ground: HostWorkspace, stdout: int, stderr: int, parent: int) -> NoReturn:
    """Run the rank of ``seat`` in a process just forked from ``parent``; never return."""
    code = 1
    try:
        _detach(seat, ground, stdout, stderr, parent)
        _adopt_driver_settings(spec, seat, ground)
        code = _run(spec, seat)
    except BaseException:
        # No exception may reach the parent's frames, which the fork copied.
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        os._exit(code)


def _detach(seat: RankSpec, ground: HostWorkspace, stdout: int, stderr: int, parent: int) -> None:
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
    _close_all_but({0, 1, 2, seat.control_fd, seat.outcome_fd, ground.payload_fd, seat.store_fd, seat.stacks_fd})
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


class _OwnLines(logging.StreamHandler[_Output]):
    """A handler that begins a new line if the program's last line is unfinished, as with progress bars."""

    def format(self, record: logging.LogRecord) -> str:
        """Format ``record``; put a line break before it if the stream's line is unfinished."""
        text = super().format(record)
        return f"\n{text}" if getattr(self.stream, "is_in_line", False) else text


def die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, its parent, ends in any way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl took effect
            os._exit(1)


def _close_all_but(keep: set[int | None]) -> None:
    kept = sorted(fd for fd in keep if fd is not None)
    for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)


def _adopt_driver_settings(spec: RunSpec, seat: RankSpec, ground: HostWorkspace) -> None:
    """Take over the driver's environment, working directory and module path, with a ``__main__`` of the rank's own."""
    if spec.whole_env:
        os.environ.clear()
    os.environ.update(spec.env)
    os.chdir(ground.cwd)
    own = [sys.path[0]]  # the entry that has lagom; see Note [Worker reuse] in spark_task.py
    sys.path[:] = own + [entry for entry in (*ground.sys_path, *sys.path[1:]) if entry not in own]
    importlib.invalidate_caches()
    sys.argv[:] = spec.argv
    sys.modules["__main__"] = types.ModuleType("__main__")
    _keep_sockets(f"{seat.host_dir}/mp-{seat.rank}")
    faulthandler.enable(file=2)
    if seat.stacks_fd is not None:
        dump_on_signal(seat.stacks_fd)
    _separate_log()


def _keep_sockets(folder: str) -> None:
    """Have multiprocessing make its sockets in ``folder``, which is removed with the run however processes end."""
    if len(folder) <= _MAX_SOCKET - len("/listener-12345678"):
        os.mkdir(folder, 0o700)
        # There is no public setting for it; children of every start method inherit this one.
        config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        config["tempdir"] = folder


def _separate_log() -> None:
    """Keep lagom's messages out of the program's log files and off its standard output."""
    handler = _OwnLines()
    handler.setFormatter(logging.Formatter("lagom: %(message)s"))
    logger = logging.getLogger("lagom")
    logger.handlers[:] = [handler]
    logger.propagate = False


def _run(spec: RunSpec, seat: RankSpec) -> int:
    from lagom.files import asked_for_rank, own_disk
    from lagom.worker import bootstrap

    place = Place(seat.rank, spec.plan.world_size, seat.local_rank, seat.local_world_size)
    control = DriverClient(socket.socket(fileno=seat.control_fd))
    heart = Heartbeat(control, spec.plan, seat.stacks_fd)
    at_home: dict[type, str] = {}
    # Until the very end of the process: exit handlers write files too.
    stack = contextlib.ExitStack()
    lands = spec.plan.rehearsal is None
    stack.enter_context(own_disk(seat.host_dir, seat.rank, place.world_size, seat.local_world_size, lands=lands))
    stack.enter_context(rank_calls_reported(asked_for_rank))

    def load() -> Call:
        call: Call = unpack_file(seat.payload_fd)
        at_home.update(classes_received())
        return call

    # The first to lock it sets the outcome: the main thread, or one that the main thread waits for in vain.
    decided = threading.Lock()

    def fail(error: BaseException) -> None:
        if decided.acquire(blocking=False):
            parcel, report = _pack_error(error, at_home)
            parcel.write(seat.outcome_fd)
            heart.send_outcome(report)

    def watch(session: Session) -> None:
        session.fail = fail
        heart.beat_for(session)

    try:
        returned = bootstrap.run(spec.plan, place, load, Path(seat.host_dir), seat, watch)
        parcel, report = _pack_result(returned, seat.rank, at_home)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are outcomes as well
        parcel, report = _pack_error(error, at_home)
    decided.acquire()
    parcel.write(seat.outcome_fd)
    _end(report, heart)


def _end(report: Message, heart: Heartbeat) -> NoReturn:
    """End the program as Python does, and report the outcome."""
    from lagom.worker import bootstrap

    if not report["ok"]:
        if "exit" in report:  # Python ends in order, and so do the threads and the atexit functions of the program
            bootstrap.run_exit_handlers(lambda: heart.send_outcome(report))
        bootstrap.flush_files()
        bootstrap.flush()
        # Report first: this process's end breaks its connections, at which other ranks fail.
        heart.send_outcome(report)
        threading.Event().wait()  # until the host process has reported the failure, and ends this one

    def end() -> NoReturn:
        heart.send_outcome(report)
        os._exit(0)

    bootstrap.run_exit_handlers(end)
    end()


def _pack_result(returned: Mapping[str, Any], rank: int, at_home: Mapping[type, str]) -> tuple[Parcel, Message]:
    try:
        return Parcel(returned, at_home), {"type": "outcome", "ok": True}
    except PayloadError as error:
        raised = PayloadError(f"rank {rank} returned a {type(returned['value']).__name__}, but {error}")
        raised.__cause__ = error.__cause__
        return _pack_error(raised, at_home)


def _pack_error(error: BaseException, at_home: Mapping[type, str]) -> tuple[Parcel, Message]:
    text = "".join(traceback.format_exception(type(error), error, _own_frames_cut(error)))[-_MAX_TEXT:]
    report = {
        "type": "outcome",
        "ok": False,
        "consequence": isinstance(error, CollectiveError),
        "error": type(error).__name__,
        "message": _message(error),
        "traceback": text,
    }
    if isinstance(error, SystemExit):
        report |= {"exit": error.code if isinstance(error.code, int | None) else str(error.code)[:_MAX_TEXT]}
        return Parcel({"error": None}), report
    error.__traceback__ = None
    for travelling in (error, InParts(error)):
        try:
            parcel = Parcel({"error": travelling}, at_home)
            unpack(bytearray(parcel.tobytes()))
        except Exception:  # a class of the program's may raise anything when pickled or unpickled
            continue
        return parcel, report
    return Parcel({"error": None}), report


def _own_frames_cut(error: BaseException) -> types.TracebackType | None:
    """Return the traceback from the user's function on; all of it if the error arose in lagom before that."""
    here = str(Path(__file__).parents[1])
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(here):
        frame = frame.tb_next
    return frame or error.__traceback__


def _message(error: BaseException) -> str:
    try:
        return str(error)[:_MAX_TEXT]
    except Exception as failure:  # a class of the program's may do anything in __str__
        return f"(its message fails with {type(failure).__name__})"
