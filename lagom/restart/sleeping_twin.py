"""``TwinForks``: forks sleeping twins of a rank now and then, one of which goes on in its place after a loss.

See Note [Sleeping twins].
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lagom.restart.open_files import NoTwinError, OpenFiles
from lagom.restart.split_pages import SplitPages
from lagom.restart.stand_in import rank_pid, stand_in_for
from lagom.restart.twin_obstacles import (
    check_process,
    copy_batches,
    end_openmp_threads,
    has_hidden_threads,
    restart_threads,
)
from lagom.restart.twin_pace import SETTLED, TwinPace

log = logging.getLogger("lagom")

MAX_PACKET = 1 << 16
_TURN_S = 0.001
_HIDDEN = "the program has threads that are not Python's"


class TwinProcess(Protocol):
    """The process of a rank, as ``TwinForks`` needs it before a fork and in the twin."""

    def num_backwards(self) -> int:
        """Return how many backwards all ranks have averaged so far."""

    def position(self) -> Sequence[int | None]:
        """Return the epoch and the step of the rank."""

    def check(self) -> None:
        """Raise a NoTwinError if the rank cannot have twins."""

    def threads(self) -> Collection[int | None]:
        """Return the system's ids of lagom's own threads, which ``go_on`` and ``meet`` start again."""

    def children(self) -> Sequence[int]:
        """Return the rank's child processes."""

    def own_fds(self) -> Collection[int]:
        """Return the descriptors that ``go_on`` replaces or keeps."""

    def still(self) -> contextlib.AbstractContextManager[None]:
        """Hold lagom's own threads and flush the output in a block."""

    def go_on(self, control: socket.socket) -> None:
        """Take the rank's place, connected to the host process by ``control``."""

    def meet(self) -> None:
        """Connect with the twins of the other ranks."""


class TwinForks:
    """Forks sleeping twins of this rank: copies of its process that wait, to go on in its place if a rank is lost.

    Args:
        channel: connection to the host process, for packets.
        due: memory shared by all ranks of the host; holds after how many backwards to fork next.
        host_dir: folder of lagom's own files.
    """

    def __init__(self, channel: socket.socket, due: memoryview, rank: int, process: TwinProcess, host_dir: str) -> None:
        self._channel, self._due, self._rank = channel, due, rank
        self._process, self._host_dir = process, host_dir
        self.before: list[Callable[[], None]] = []
        """Called before each fork."""
        self.after: list[Callable[[], None]] = []
        """Called in a twin that goes on."""
        self._lock = threading.Lock()
        self._pid = rank_pid()
        self._taken = 0
        self._armed = False
        self._known: set[str] = set()
        """Files that the program has opened to append to them."""
        self._grown: set[str] = set()
        """Files in ``_known`` that the program has opened to append to them since the last fork."""
        self._pace = TwinPace()
        self._pages, self._join_at = SplitPages(), math.inf
        """Huge pages that a fork splits, and the number of backwards after which they are joined again."""
        self._waiting: threading.Thread | None = None
        """Waits for the end of the process that forks the last twin."""
        self._ended: tuple[int, float] | None = None
        """Status of that process and the seconds of a core that it has used, once it has ended."""
        self._failed = False
        """Whether such a process could not fork the twin."""

    def point(self, *, begins_pass: bool = False) -> None:
        """Fork a twin if one is due: called where nothing is under way, at the same places on all ranks.

        Rank 0 also plans when the next twins are due.

        Args:
            begins_pass: whether a pass with workers begins here; such places are far apart.
        """
        if self._ended is not None:
            self._note_end()
        if self._join_at < math.inf and self._process.num_backwards() >= self._join_at:
            self._pages.join()
            self._join_at = math.inf
        if self._due[0] > self._taken and self._process.num_backwards() >= self._due[0]:
            self._taken = self._due[0]
            try:
                self._take(begins_pass)
            except (OSError, ValueError) as error:  # no process, no file, or no host process any more
                self._armed, self._pace.next_at, self._taken = False, math.inf, sys.maxsize
                with contextlib.suppress(OSError):
                    self._tell({"what": "rewrites"})
                log.warning("this rank has no sleeping twins any more: %s", error)
        if self._rank == 0 and time.perf_counter() >= self._pace.next_at:
            num_backwards = self._process.num_backwards()
            if num_backwards + 1 > self._due[0] and self._pace.plans(num_backwards, self._armed):
                self._due[0] = num_backwards + 1

    # Files

    def rewrites(self) -> None:
        """Note that the program is about to change a file other than by appending: a twin would find it changed."""
        with self._lock:
            if not self._armed:
                return
            self._armed = False
            self._tell({"what": "rewrites"})
        self._pace.hurry()

    def appends(self, path: str, is_new: bool) -> None:
        """Note that the program has opened ``path``, an absolute path on the disk, to append to it."""
        if is_new or path not in self._known:
            self._known.add(path)
            self.rewrites()
        elif self._armed and path not in self._grown:
            self._grown.add(path)
            status = os.stat(path)
            self._tell({"what": "grows", "path": path, "is": [status.st_dev, status.st_ino], "size": status.st_size})

    # Failed exchanges

    def hold(self) -> None:
        """Wait after an exchange has failed: if a rank was killed, this process ends here, and twins go on."""
        with self._lock:
            if self._armed and rank_pid() == self._pid:
                with contextlib.suppress(OSError):
                    self._ask({"what": "broken"})

    # Forks

    def _take(self, begins_pass: bool) -> None:
        start = time.perf_counter()
        obstacle, files, has_batches = None, None, False
        if self._waiting is not None:
            self._waiting.join()
            self._waiting = None
        self._note_end()
        failed, self._failed = self._failed, False
        try:
            if failed:
                raise NoTwinError("it could not be forked")
            for call in self.before:
                call()
            self._process.check()
            has_batches = check_process(self._process.threads(), self._process.children())
            end_openmp_threads()
            if has_hidden_threads(self._process.threads()):
                raise NoTwinError(_HIDDEN)
        except (NoTwinError, OSError) as error:
            obstacle = str(error)
        with self._process.still():
            if obstacle is None:
                # Not before: a thread of lagom's may have had a file open for a moment, which a twin would look for.
                files, obstacle = self._open_files()
            own_s = time.perf_counter() - start
            while True:
                place = [self._taken, *self._process.position()]
                answer = self._ask({"what": "at", "place": place, "obstacle": obstacle})
                if not answer.get("number"):
                    self._pace.refuse(own_s, begins_pass)
                    return
                assert files is not None
                start = time.perf_counter()
                if self._fork(answer["number"], files, has_batches):
                    own_s = 0.0  # this is a twin that goes on: it has one itself at once
                    continue
                break
        self._armed, self._grown = True, set()
        self._pages.copy_written()
        self._join_at = self._process.num_backwards() + SETTLED
        self._pace.fork(own_s + time.perf_counter() - start, self._process.num_backwards())

    def _open_files(self) -> tuple[OpenFiles | None, str | None]:
        """Return the open files of this process; or None, and why it cannot have a twin."""
        try:
            return OpenFiles([*self._process.own_fds(), self._channel.fileno()], self._host_dir), None
        except (NoTwinError, OSError) as error:
            return None, str(error)

    def _fork(self, number: int, files: OpenFiles, has_batches: bool) -> bool:
        """Fork a twin; return False in this process, and True in the twin when it goes on."""
        state, first = random.getstate(), rank_pid()
        end_openmp_threads()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pages.before_fork()
        pid = os.fork()
        if pid == 0:
            try:
                if has_batches:
                    copy_batches()
                between = os.getpid()
                if os.fork():
                    os._exit(0)  # the twin is a child of the host process from now on
                ours.close()
                self._sleep(theirs, files, between)
                random.setstate(state)  # Python seeds it in each fork
                stand_in_for(first)
                self._wake(theirs, files)
            except BaseException:
                traceback.print_exc()
                os.kill(os.getpid(), signal.SIGKILL)  # a loss, after which the run begins again
            return True
        theirs.close()
        why = _HIDDEN if has_hidden_threads(self._process.threads()) else ""
        socket.send_fds(self._channel, [_packed({"what": "forked", "number": number, "why": why})], [ours.fileno()])
        ours.close()
        if has_batches:  # the process between copies them: until it has ended, the program must not change them
            self._await_end(pid)
        else:
            self._waiting = threading.Thread(target=self._await_end, args=(pid,), name="lagom-twin", daemon=True)
            self._waiting.start()
        return False

    def _await_end(self, pid: int) -> None:
        """Wait until the process ``pid``, which has forked the twin, has ended."""
        status, seconds = 0, 0.0
        with contextlib.suppress(ChildProcessError):  # a handler of the program's has waited for it
            _, status, usage = os.wait4(pid, 0)
            seconds = usage.ru_utime + usage.ru_stime
        self._ended = status, seconds

    def _note_end(self) -> None:
        """Add the time that the process which forked the last twin has used, if that process has ended."""
        if self._ended is not None:
            (status, seconds), self._ended = self._ended, None
            self._failed = self._failed or status != 0
            self._pace.add(seconds)

    def _sleep(self, bed: socket.socket, files: OpenFiles, between: int) -> None:
        """Wait in a twin, once the process ``between`` has ended, until the host wakes the twin or lets it end."""
        os.setpgid(0, 0)
        score = Path("/proc/self/oom_score_adj").read_text()
        _set_oom_score("1000")  # if memory is short, the system kills the twin first
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (1, 2):
            os.dup2(nothing, fd)
        os.close(nothing)
        self._channel.close()
        while os.getppid() == between:  # a twin that goes on must not end with that process
            time.sleep(_TURN_S)
        bed.send(_packed({"what": "sleeps", "pid": os.getpid()}))
        if not bed.recv(MAX_PACKET):
            os._exit(0)
        bed.send(_packed({"fits": files.have_only_grown()}))  # before the loss counts as one that twins go on after
        self._woken = socket.recv_fds(bed, MAX_PACKET, 3)
        if not self._woken[0]:
            os._exit(0)
        _set_oom_score(score)

    def _wake(self, bed: socket.socket, files: OpenFiles) -> None:
        control, *streams = self._woken[1]
        for fd, stream in zip((1, 2), streams, strict=True):
            os.dup2(stream, fd)
            os.close(stream)
        self._channel = bed
        files.restore()
        self._process.go_on(socket.socket(fileno=control))
        restart_threads()
        for call in self.after:
            call()
        self._process.meet()

    def _tell(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(_packed(message))

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self._channel.send(_packed(message))
        answer = self._channel.recv(MAX_PACKET)
        found: dict[str, Any] = json.loads(answer or b"{}")
        return found


def _packed(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _set_oom_score(score: str) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(score)


def can_have_twins() -> bool:
    """Return whether this system has what twins need."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(socket, "recv_fds")


# Note [Sleeping twins]
#
# Without a checkpoint or a snapshot, a program begins anew after a loss. But its process can be forked: the kernel
# copies the process as it is, page by page as pages are written. So now and then each rank forks a twin that sleeps.
# When a rank is killed, the host process kills the others too and wakes all twins, which go on from the batch at which
# they were forked. Nothing is dealt out anew: the killed rank has a twin.
#
# Point. A twin can only be forked where nothing is under way, and all ranks must fork at the same place of the
# program: at the first `next` of a loader after backward X, or, if it has workers, which a fork would lack, at the
# beginning of a pass. Rank 0 chooses X by its clock, as the next backward, and writes it into memory that all ranks of
# the host have. A rank comes past backward X only after rank 0 has begun it, so it has seen X. At the point each rank
# asks the host process, which has all ranks fork if they have come to the same place, and else lets them go on without.
#
# Twin. It is forked twice, so that it is a child of the host process, which ends it and waits for it. The program's
# `os.wait` does not see the twin. For some 30 ms it may see the process between, for which a thread waits meanwhile; if
# that process copies batches, the rank itself waits. The twin says that it sleeps once the process between has ended.
#
# What a fork lacks or shares. Threads: lagom's own, tqdm's and TensorBoard's are started again, OpenMP's end before the
# fork, and jemalloc's is not needed; a program with any other has no twins. Memory that ranks share: the communicator
# joins another segment, as the same object, so that all that refers to it stays. Positions of open files: noted, and
# restored. Python's `random` is seeded in each fork: restored. Batches of workers that have ended lie in shared memory:
# copied in the fork. Sockets, child processes, other shared memory, files that are changed in place: no twins.
#
# Files. Twins would find files as the lost ranks have left them. So each change of a file ends the twins, and rank 0
# plans the next point, as soon as the time that forks may take allows. Two changes do not end them: appending to files
# that the program has appended to before, and writing in order to files that were open at the point. These files are
# cut to their length at the point.
#
# Output. The driver marks what ranks had written at the point, and then holds back what is written once more.
#
# Cost. A fork copies page tables, and each page that is written afterwards is copied once. Rank 0 measures both (the
# second as time of the system during the next backwards), and adds the core time of the process between rank 0 and its
# twin, for which rank 0 does not wait. It forks as often as all this takes 1% of the run's time. What a fork
# does to huge pages: Note [Split pages] in split_pages.py.
