"""``Snapshots``: writes the program's state to disk now and then, and goes on from it. See Note [Snapshots]."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lagom.accelerators import device_model, is_accelerator
from lagom.device_models import DeviceModel, describe_differences
from lagom.errors import LagomError, SnapshotError
from lagom.extensions.observe.tracking.tensorboard import write_queued_events
from lagom.extensions.resume.call_memory import CallMemory
from lagom.extensions.resume.frame_position import NoSnapshotError
from lagom.extensions.resume.passes.loader_positions import PASS_START
from lagom.extensions.resume.passes.worker_positions import WorkersInPassError
from lagom.extensions.resume.program_state import ProgramInProgress
from lagom.extensions.resume.shard_files import ShardFiles
from lagom.extensions.resume.snapshot_files import SnapshotFiles
from lagom.extensions.resume.snapshot_pace import SnapshotPace
from lagom.program.payload import Parcel, parts_of
from lagom.program.signature import Call
from lagom.restart.kept_snapshots import Snapshot
from lagom.wire.snapshot_messages import LEAVE_SNAPSHOT_S, NoSnapshot, SnapshotKept, SnapshotMarked, SnapshotPoint

if TYPE_CHECKING:
    from lagom.session.session import Session

Pickled = tuple[bytes, list[memoryview]]
"""A pickle, and its large buffers."""
_FIRST_LOOK_S, _LOOK_S, PATIENCE_S = 0.02, 0.1, 1800.0
"""Seconds until the first look at whether a fork has written its snapshot, between two looks, and after which a fork is
killed as stuck."""
_WANTED_LOOK_S = 0.005
"""Seconds between two looks at whether the snapshot has been written that the driver waits for."""
FORKED: tuple[str, ...] = ("cpu",)
"""Kinds of devices whose tensors a fork can read. Accelerators do not work in a fork: their ranks pickle, then fork."""
_THREADS = ("lagom", "QueueFeeder", "GetTelemetryConfig", "MLflowTelemetry")
"""Beginnings of the names of threads that a snapshot may leave out: the program does not need them to go on."""
_RESTARTED = {"TMonitor", "_AsyncWriterThread"}
"""Classes of threads that are started again: of tqdm's bars, and of TensorBoard's writers."""


class Snapshots:
    """The snapshots of one rank: rank 0 takes them, and all ranks can go on from one.

    Args:
        files: the files of the snapshots.
        payload_fd: file with the pickled call, from which the call's data is mapped.
        tell: sends a message to the driver.
        ask: sends a message to the host process and waits for the answer.
        own_classes: classes that came with the call, with the sender's ids for them.
        lengths: flushes the files that the program goes on writing, and returns their lengths by path.
        settings: two functions; the first returns the settings of libraries, the second sets them.
        notice_fd: file whose first byte changes when a snapshot is wanted at the next batch.
    """

    def __init__(
        self,
        session: Session,
        files: SnapshotFiles,
        payload_fd: int,
        tell: Callable[[NoSnapshot | SnapshotKept], None],
        ask: Callable[[SnapshotPoint], object],
        own_classes: Mapping[type, str],
        lengths: Callable[[], dict[str, int]],
        settings: tuple[Callable[[], Any], Callable[[Any], None]],
        notice_fd: int | None = None,
    ) -> None:
        self._session, self._files, self._tell, self._ask = session, files, tell, ask
        self.program = ProgramInProgress(session, own_classes, settings)
        self._memory = CallMemory(payload_fd, files.open_call)
        self._lengths = lengths
        self._pace = SnapshotPace(session.config.snapshot_every_s or 0.0)
        self._wanted = mmap.mmap(notice_fd, 1, prot=mmap.PROT_READ) if notice_fd is not None else b"\0"
        self._num_wanted = 0
        self._is_wanted = False
        """Whether the driver waits for the snapshot that is to be taken next, or is being written."""
        self._number = files.last_number
        self._facts: dict[str, Any] = {}
        """The description of the snapshot that is being written."""
        self._child: int | None = None
        self._answer = -1
        self._why = ""
        self._asked: Any = None
        self._refused: Any = None
        """Start of a pass at whose later batches no snapshot is tried: the workers of a loader have prevented one."""

    @property
    def journal(self) -> str | None:
        """Return the file with the calls of MLflow, for a run that goes on; None if this host does not see it."""
        return self._files.journal

    def prepare(self, call: Call, known: Mapping[str, Any]) -> Callable[[], Any] | None:
        """Compile the functions of ``call`` anew, so that their positions can be read; restore the snapshot, if any.

        Args:
            known: objects of lagom's that the program may hold, by name.

        Returns:
            The function to call instead: the rest of the program, if the run goes on from a snapshot, or a new run of
            a script; None if the training function itself is to be called.

        Raises:
            SnapshotError: if the run cannot go on from its snapshot here.
            LagomError: if other users can write to the snapshot.
        """
        resumed, why = self._files.resumed, self._files.obstacle(self._session.rank)
        if why and resumed is not None:
            raise SnapshotError(why)
        if resumed is not None and self._session.rank == 0:
            self._files.check_written()
        if why and self._session.rank == 0:
            self._pace.stop()
            self._tell(NoSnapshot(why=why))
        script = self.program.prepare(call, known)
        return self._restore(resumed) if resumed is not None else script

    def point(self, iterator: Any) -> None:
        """Take a snapshot if one is due, or see whether the last one is written; only rank 0 does anything.

        Called before ``iterator``, of a loader, gives the program a batch.
        """
        if self._session.rank != 0:
            return
        self._see_whether_wanted()
        if time.perf_counter() < self._pace.next_at:
            return
        if self._child is not None:
            self._look()
            return
        self._try_at(iterator)
        self._await_wanted()

    def _await_wanted(self) -> None:
        """Wait while the snapshot that the driver waits for is written: the next batch may take longer than that."""
        end = time.perf_counter() + LEAVE_SNAPSHOT_S
        while self._is_wanted and self._child is not None and time.perf_counter() < end:
            time.sleep(_WANTED_LOOK_S)
            self._look()

    def _see_whether_wanted(self) -> None:
        if self._wanted[0] != self._num_wanted and self._child is None and not self._pace.has_stopped:
            self._num_wanted, self._is_wanted, self._refused = self._wanted[0], True, None
            self._pace.next_at = 0.0

    def _try_at(self, iterator: Any) -> None:
        """Take a snapshot before ``iterator`` gives a batch; if this is not possible here, put it off."""
        if iterator._num_yielded and vars(iterator)[PASS_START] is self._refused:
            return
        start, self._asked = time.perf_counter(), vars(iterator)[PASS_START]
        try:
            self._check_process()
            frames = self.program.frames(sys._getframe(1))
            pickled = self._pickle_here(frames, iterator)
        except NoSnapshotError as error:
            self._refused = self._asked if isinstance(error.__cause__, WorkersInPassError) else None
            self._put_off(str(error), time.perf_counter() - start)
            return
        try:
            self._take(pickled or partial(self._pickle_in_fork, frames, iterator), start)
        except NoSnapshotError as error:
            self._put_off(str(error), time.perf_counter() - start)

    def _check_here(self) -> None:
        """Check that a snapshot can be taken at this place of the program, as far as its functions decide this.

        Raises:
            NoSnapshotError: if not.
        """
        self._check_process()
        self.program.frames(sys._getframe(1))

    def _check_process(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise NoSnapshotError("a loader is read in a thread of the program's")
        if self._session.has_joined:
            raise NoSnapshotError("the program is distributed already")
        for thread in threading.enumerate():
            is_known = thread is threading.main_thread() or thread.name.startswith(_THREADS)
            if is_known or _is_restarted(thread):
                continue
            raise NoSnapshotError(f"the program has a thread, {thread.name}")
        if "wandb" in sys.modules:
            raise NoSnapshotError("the program uses wandb")
        if (name := self._files.unsent()) is not None:
            raise NoSnapshotError(
                f"the program has written {name} to the working directory of an executor, which only that host sees; "
                "let it write to absolute paths on a disk that all hosts share"
            )

    def _put_off(self, why: str, seconds: float | None = None) -> None:
        if self._pace.put_off(seconds) and why != self._why:
            self._why = why
            self._tell(NoSnapshot(why=why))

    def _pickle_here(self, frames: Any, iterator: Any) -> Callable[[], Pickled] | None:
        """Pickle the state in the rank if a fork could not; return a function that returns the pickle, else None."""
        if self._session.device.type in FORKED:
            return None
        try:
            self.program.note_process()
            pickled = self.program.pickle(frames, iterator)
        except NoSnapshotError:
            raise
        except Exception as error:  # it must not end the program, as an error in a fork does not
            raise NoSnapshotError(describe_error(error)) from error
        return lambda: pickled

    def _pickle_in_fork(self, frames: Any, iterator: Any) -> Pickled:
        self.program.note_process()
        torch.set_num_threads(1)  # torch's threads are not in the fork
        return self.program.pickle(frames, iterator)

    def _take(self, pickle: Callable[[], Pickled], start: float) -> None:
        number = self._number = self._next_number()
        write_queued_events()
        lengths = self._lengths()
        sys.stdout.flush()
        sys.stderr.flush()
        marked = self._ask(SnapshotPoint(number=number))
        assert isinstance(marked, SnapshotMarked)
        progress = self._session.passes.progress
        self._facts = {
            "at": time.time(),
            "place": [progress["epoch"], progress["step"]],
            "lengths": lengths,
            "world_size": self._session.world_size,
            "device": self._device(),
        }
        state = random.getstate()
        pid, reader, writer = fork()
        if pid == 0:
            random.setstate(state)  # Python seeds ``random`` anew in each fork
            self._write_in_fork(number, pickle, writer)
        os.close(writer)
        self._child, self._answer = pid, reader
        self._pace.fork(start)
        self._pace.next_at = self._pace.forked_at + _FIRST_LOOK_S

    def _next_number(self) -> int:
        return self._number + 1

    def _write_in_fork(self, number: int, pickle: Callable[[], Pickled], writer: int) -> None:
        """Write the snapshot in a fork, send the result to the rank by ``writer``, and end the fork."""
        answer: dict[str, Any] = {"number": number}
        try:
            os.nice(10)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a batch system sends it to all processes of a job
            let_go(writer)
            answer |= self._write(number, *pickle())
        except BaseException as error:
            self._files.remove_partial(number)
            answer |= {"why": describe_error(error), "in_pass": isinstance(error.__cause__, WorkersInPassError)}
        finally:
            with contextlib.suppress(OSError):
                os.write(writer, json.dumps(answer).encode())
            os._exit(0)

    def _write(self, number: int, pickled: bytes, buffers: list[memoryview]) -> dict[str, Any]:
        return self._files.write(number, self._parcel(pickled, buffers), self._facts)

    def _parcel(self, pickled: bytes, buffers: list[memoryview]) -> Parcel:
        references, own = self._memory.split(buffers)
        head = json.dumps({"references": references}).encode()
        return Parcel.of_parts(head, [memoryview(pickled), *own])

    def _look(self) -> None:
        """See whether the fork has written its snapshot, and tell the driver; kill a fork that is stuck."""
        assert self._child is not None
        try:
            pid, _, usage = os.wait4(self._child, os.WNOHANG)
            used_s = usage.ru_utime + usage.ru_stime
        except ChildProcessError:  # the program has waited for it
            pid, used_s = self._child, 0.0
        if pid == 0:
            self._pace.next_at = time.perf_counter() + _LOOK_S
            if self._pace.next_at - self._pace.forked_at > PATIENCE_S:
                os.kill(self._child, signal.SIGKILL)
            return
        answer = json.loads(os.read(self._answer, 1 << 16) or b'{"why": "the process that wrote it was killed"}')
        os.close(self._answer)
        if "bytes" not in answer:
            self._files.remove_partial(self._number)
        self._child = None
        if "why" in answer:
            self._refused = self._asked if answer.get("in_pass") else None
            self._put_off(answer["why"])
            return
        self._tell(SnapshotKept(place=self._facts["place"], at=self._facts["at"], is_wanted=self._is_wanted, **answer))
        self._is_wanted = False
        self._pace.written(used_s)

    def _device(self) -> dict[str, Any] | None:
        """Return the model of this rank's accelerator, for the description of a snapshot; None on the CPU."""
        device = self._session.device
        return asdict(device_model(device)) if is_accelerator(device) else None

    def _compare_device(self, snapshot: Snapshot) -> None:
        """Say in one line if ``snapshot`` was taken on another model of accelerator than that of this rank, rank 0."""
        if "device" not in snapshot.facts or self._session.rank != 0:
            return
        models = {"the snapshot": snapshot.facts["device"], "this run": self._device()}
        known = {owner: DeviceModel(**model) if model is not None else None for owner, model in models.items()}
        if line := describe_differences(known):
            self._session.say_once(line)

    def _restore(self, snapshot: Snapshot) -> Callable[[], Any]:
        self._compare_device(snapshot)
        with open(self._files.open_state(snapshot), "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        head, pickled, *own = parts_of(memoryview(mapped))
        buffers = self._memory.join(json.loads(bytes(head))["references"], own)
        if snapshot.parts:
            self._session.resumption.parts = ShardFiles(self._files.open_parts(snapshot))
        try:
            return self.program.restore(pickled, buffers)
        except SnapshotError:
            raise
        except Exception as error:
            raise SnapshotError(f"the snapshot cannot be put back: {type(error).__name__}: {error}") from error


def _is_restarted(thread: threading.Thread) -> bool:
    """Return whether ``thread`` belongs to a bar or writer, which starts it again in another process."""
    return type(thread).__name__ in _RESTARTED and type(thread).__module__.startswith(("tqdm.", "tensorboard."))


def let_go(kept: int) -> None:
    """Close a fork's copies of the rank's sockets and pipes but ``kept``, since these have to end with the rank.

    Standard input, output and error become /dev/null.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            if fd > 2 and fd != kept and os.readlink(f"/proc/self/fd/{fd}").startswith(("socket:", "pipe:")):
                os.close(fd)


def fork() -> tuple[int, int, int]:
    """Fork; return the fork's process, 0 in the fork itself, and the ends of a pipe between it and this process.

    Raises:
        NoSnapshotError: if there are too many processes or open files, or too little memory.
    """
    ends: tuple[int, ...] = ()
    try:
        reader, writer = ends = os.pipe()
        return os.fork(), reader, writer
    except OSError as error:
        for end in ends:
            os.close(end)
        raise NoSnapshotError(f"the process could not be forked: {error}") from error


def describe_error(error: BaseException) -> str:
    """Return why ``error`` prevents a snapshot, as text for a user."""
    if isinstance(error, (NoSnapshotError, LagomError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


# Note [Snapshots]
#
# A snapshot is the state of a program in progress, from which another process goes on. With batches="whole" all ranks
# hold the same state, that of one process, so rank 0 takes snapshots alone, and any number of ranks goes on from one:
# each of them puts it back, and then calls the rest of the program.
#
# Point. A snapshot is taken where a loader is about to give a batch: nothing is under way there but functions of the
# program. A fork of the rank has the state of that moment (copy on write). The fork pickles the state and writes it to
# the run's folder, or sends it to the driver, while the rank goes on. A fork cannot read tensors on an accelerator:
# there the rank itself pickles the state, and the fork only writes the bytes. The description of a snapshot is moved to
# its place last, so a snapshot is there as a whole or not at all.
#
# Functions in progress. Python tells the instruction that each frame is at, and so the call or the loop in its source,
# and gives the values of its variables. It does not give the iterators of loops and the managers of `with` blocks,
# which lie on the stack of values. So functions of the program are compiled anew when the rank has received them, with
# a variable for each iterator and manager (source_code.py). This costs time at the begin of a loop or block, and none
# in each iteration. To go on, the rest of each function from its position on is built from its source, as a function of
# its own, from the innermost outwards (continuation.py).
#
# Objects. One pickle has all variables, so that what was one object stays one: parameters in a model and in its
# optimizer (state_pickle.py). object_reducers.py has the objects that do not pickle by themselves. Iterators of loaders
# are begun again with the random states of their pass (loader_positions.py). They skip the indices of the batches that
# they had given; an iterable data set is read again up to its place.
#
# Refused. Where a frame cannot be read (a generator, a library that calls the program back), or an object cannot be
# pickled, the snapshot waits for a later batch. If a snapshot is late by as long as two should be apart, the user is
# told the reason.
#
# Files and output. To a snapshot belong the lengths of the files that the program goes on writing, and a mark in its
# output. A new attempt finds the files cut to these lengths (WrittenFiles.go_back). Its output is held back as long as
# it repeats the lost attempt's output after the mark (ShownOutput.go_back).
