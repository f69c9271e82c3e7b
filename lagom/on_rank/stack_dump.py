"""Python stacks of a process: read within the process, or dumped on a signal if Python itself is stuck."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
import types
from pathlib import Path

from lagom.wire.messages import Doing

SIGNAL: int | None = getattr(signal, "SIGRTMAX", signal.SIGRTMIN) - 1 if hasattr(signal, "SIGRTMIN") else None
"""Real-time signal at which a process writes its stacks; programs hardly use it. None if the system has none."""
_OWN = str(Path(__file__).parents[1]) + os.sep
_CALLERS = (os.path.join(_OWN, "on_rank") + os.sep, os.path.join(_OWN, "program", "script.py"))
_LOOP = os.path.join("torch", "utils", "data", "_utils", "worker.py")
_EXCHANGES = (os.path.join(_OWN, "exchange") + os.sep, os.path.join("torch", "distributed") + os.sep)
_PURPOSES = {
    os.path.join(_OWN, *path.split("/")): what
    for path, what in {
        "extensions/zero": "state that is shared out",
        "forward/rows/whole_batch.py": "outputs of a forward",
        "forward/batchnorm.py": "BatchNorm's statistics",
        "forward/batchnorm_arithmetic.py": "BatchNorm's statistics",
        "gradients/buffers.py": "buffers",
        "gradients/gradient_averager.py": "gradients",
        "gradients/autograd_grad.py": "gradients",
        "batches/sampler_sync.py": "the order of a data loader",
        "batches/self_sharded.py": "sizes of batches",
        "distributed/init_process_group.py": "init_process_group",
        "gradients/divergence.py": "where each rank is",
    }.items()
}
"""Subject of an exchange, by the innermost file on the stack whose path contains one of these."""
_AWAITING = (
    os.path.join("multiprocessing", "process.py"),
    os.path.join("multiprocessing", "pool.py"),
    os.path.join("multiprocessing", "spawn.py"),  # torch's
    os.path.join("concurrent", "futures", "_base.py"),
    os.sep + "subprocess.py",
)
"""Files with the functions by which a process waits for its child processes."""
_INNERMOST = 6
_LIBRARIES = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib", "platlib")})
_MAX_TEXT = 40_000  # most characters of stacks; the innermost frames are kept
_AGAIN_S = 0.05
_ANSWER_S = 0.3  # time in which a process must write its stacks
_MAX_CHILDREN = 8


def dump_on_signal(fd: int) -> None:
    """Make this process, and its later forks, write their stacks to the file ``fd`` on ``SIGNAL``."""
    if SIGNAL is not None:
        faulthandler.register(SIGNAL, file=fd, all_threads=True)


def doing(frame: types.FrameType | None) -> Doing:
    """Describe the current work of the thread whose innermost frame is ``frame``."""
    frames = list(traceback.walk_stack(frame))  # innermost first
    files = [one.f_code.co_filename for one, _ in frames]
    program = next((n for n, file in enumerate(files) if file.startswith(_CALLERS)), len(files))
    summary = traceback.StackSummary.extract(reversed(frames[:program]))
    purpose = next((what for file in files[:program] for part, what in _PURPOSES.items() if part in file), "")
    own = next((one for one in reversed(summary) if not one.filename.startswith((_OWN, *_LIBRARIES, "<frozen"))), None)
    return Doing(
        stack="".join(summary.format())[-_MAX_TEXT:],
        line="" if own is None else f"{own.filename}:{own.lineno}, in {own.name}: {own.line}".removesuffix(": "),
        purpose=purpose,
        waits=program > 0 and any(part in files[0] for part in _EXCHANGES),
    )


def position(frame: types.FrameType | None) -> int:
    """Return a hash of the positions in all frames of the stack of ``frame``; it changes when the thread moves."""
    return hash(tuple((id(one.f_code), one.f_lasti) for one, _ in traceback.walk_stack(frame)))


def of_children(fd: int) -> str:
    """Return the stacks of up to 8 child processes that dump them on a signal, such as workers of a data loader.

    Args:
        fd: file to which they dump.
    """
    try:
        pids = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    except OSError:
        return ""
    stacks = {pid: read_stack(int(pid), fd) for pid in pids[:_MAX_CHILDREN]}
    return "".join(f"process {pid}, which it started:\n{text}" for pid, text in stacks.items() if text)[-_MAX_TEXT:]


def read_stack(pid: int, fd: int) -> str:
    """Signal the process ``pid`` to dump its stacks to ``fd``, and return the main thread's stack.

    Return "" if the process does not handle the signal, or does not answer in time.
    """
    if SIGNAL is None or not _listens(pid):
        return ""
    start = size = os.fstat(fd).st_size
    with contextlib.suppress(OSError):
        os.kill(pid, SIGNAL)
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            before, size = size, os.fstat(fd).st_size
            if start < size == before:
                break
    return _readable(os.pread(fd, size - start, start).decode(errors="replace")) if size > start else ""


def _readable(text: str) -> str:
    """Return the main thread's stack in ``faulthandler``'s text, formatted as a traceback, from the program inwards."""
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', text.rstrip().split("\n\n")[-1], flags=re.MULTILINE)
    program = next((n for n, (file, _, _) in enumerate(frames) if file.startswith(_CALLERS) or _LOOP in file), None)
    shown = [traceback.FrameSummary(file, int(line), name) for file, line, name in reversed(frames[:program])]
    return "".join(traceback.format_list(shown))


def _listens(pid: int) -> bool:
    """Return whether the process has a handler for the signal, which would kill a process without a handler."""
    assert SIGNAL is not None
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def state(pid: int) -> str:
    """Return a text if the process ``pid`` is stopped or in an uninterruptible wait, which no stack shows; else ""."""
    from lagom.watch.stopped_processes import STOPPED, state_letter  # for a rank that is stuck

    letter = state_letter(pid)
    if letter == "D":
        time.sleep(_AGAIN_S)  # a wait for a disk is normal if it is short
        letter = state_letter(pid)
    if letter in STOPPED:
        return f"its process {pid} is stopped, by SIGSTOP or a debugger; kill -CONT {pid} on its host lets it go on"
    if letter == "D":
        return f"its process {pid} waits for a disk or a device, and no signal reaches it (state D)"
    return ""


def waits_for_process(frame: types.FrameType | None) -> bool:
    """Return whether the thread of ``frame`` waits for a child process, for its end or its result."""
    files = [one.f_code.co_filename for one, _ in traceback.walk_stack(frame)][:_INNERMOST]
    return any(file.endswith(_AWAITING) for file in files)


def of_thread(ident: int) -> types.FrameType | None:
    """Return the innermost frame of the thread ``ident``; None if the thread has ended."""
    return sys._current_frames().get(ident)
