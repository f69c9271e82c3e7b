"""The process that holds the ranks of one task: forks them, carries what they say to the driver, ends them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import selectors
import signal
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lagom.monitor.link import Link, LinkClosed, Message
from lagom.worker.child import become
from lagom.worker.ground import Ground
from lagom.worker.rendezvous import meet
from lagom.worker.spec import Seat, Spec

_UNSAID = 200_000  # characters of output that travel with the results where no link carries them
_TAIL = 8192  # bytes of a rank's last output that are kept for the report of its death
_STOP_S = 1.0  # how long a failure waits for the driver to take it in
_CONSEQUENCE_S = 3.0  # how long a lost connection waits for the failure that caused it to be told elsewhere
_POLL_S = 0.02  # where the kernel does not tell of a child's end


def hold(
    spec: Spec,
    task: int,
    ground: Ground,
    link: Link | None,
    gather: Callable[[str], Sequence[str]] | None,
    outcome_fds: Sequence[int],
    ip: str,
    gpus: Sequence[str] = (),
) -> list[Message]:
    """Run the ranks of ``task`` to their end; returns a report for each, in rank order.

    What each returned or raised is in its file of ``outcome_fds``. ``gpus`` are what their GPU masks become, in order.

    Raises:
        Stopped: the run ended before it began.
        LinkClosed, PlanError: the ranks could not find together.
    """
    first = task * spec.plan.ranks_per_slot
    ranks = range(first, min(first + spec.plan.ranks_per_slot, spec.plan.world_size))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((ip, 0))) if task == 0 else None
        store = listener.getsockname()[:2] if listener else None
        table = meet(link, gather, _join(task, ranks, ground, ip, store, gpus))
        watch = _Watch(link)
        stack.callback(watch.end_all)
        local_ranks = list[int]()
        for rank, outcome_fd in zip(ranks, outcome_fds, strict=True):
            gpu = gpus[rank - first] if gpus else None
            store_fd = listener.fileno() if listener and rank == 0 else None
            seat = _seat(table, rank, spec, ground, outcome_fd, store_fd, gpu)
            watch.add(_fork(spec, seat, ground))
            local_ranks.append(seat.local_rank)
        reports = watch.until_over()
        if spec.plan.rehearsal is not None:
            return watch.with_unsaid(reports)
        from lagom.patching.settle import settle  # not before the ranks are over: it comes with torch

        for problem in settle(ground.host_dir, ranks, local_ranks):
            watch.say(f"[lagom] {problem}\n")
        return watch.with_unsaid(reports)


def _join(task: int, ranks: Sequence[int], ground: Ground, ip: str, store: Any, gpus: Sequence[str]) -> Message:
    return {
        "type": "join",
        "task": task,
        "ranks": list(ranks),
        "host": ground.host,
        "ip": ip,
        "store": store,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "gpus": list(gpus[: len(ranks)]),
        "torch": importlib.metadata.version("torch").split("+")[0],
    }


def _seat(
    table: Message, rank: int, spec: Spec, ground: Ground, outcome_fd: int, store_fd: int | None, gpu: str | None
) -> Seat:
    own = table["ranks"][rank]
    here = [other["rank"] for other in table["ranks"] if other["host"] == own["host"]]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    chosen = spec.env.get("OMP_NUM_THREADS", "").partition(",")[0]
    alone = spec.whole_env and len(here) == 1  # then torch's own default, which a plain run has too
    gpu, gpu_index = _visible(table, rank, here, gpu) if spec.plan.already_distributed else (gpu, 0)
    return Seat(
        rank=rank,
        local_rank=here.index(rank),
        local_world_size=len(here),
        ip=own["ip"],
        store=(table["store"][0], table["store"][1]),
        store_fd=store_fd,
        control_fd=-1,
        outcome_fd=outcome_fd,
        payload_fd=ground.payload_fd,
        host_dir=str(ground.host_dir),
        threads=int(chosen) if chosen.isdigit() else 0 if alone else max(1, cores // len(here)),
        gpu=gpu,
        gpu_index=gpu_index,
        nccl=bool(table["nccl"]),
    )


def _visible(table: Message, rank: int, here: Sequence[int], gpu: str | None) -> tuple[str | None, int]:
    """The GPU mask of a program that is distributed already, and the index of the rank's own GPU in it.

    Such a program takes the device that LOCAL_RANK says, so sees the GPUs of all ranks of its host, in their order.
    Not where ranks share them, nor parts of a GPU (MIG), of which a process can only see one.
    """
    masks = [str(table["ranks"][other]["gpu"]) for other in here]
    if gpu is None or not table["nccl"] or any(mask.startswith("MIG") or "," in mask for mask in masks):
        return gpu, 0
    return ",".join(masks), here.index(rank)


@dataclass(slots=True)
class _Rank:
    """A forked rank, seen from its host process."""

    rank: int
    pid: int
    pidfd: int | None
    control: Link
    stdout: int
    stderr: int
    tail: bytearray = field(default_factory=bytearray)
    report: Message | None = None
    ended: bool = False


def _fork(spec: Spec, seat: Seat, ground: Ground) -> _Rank:
    import dataclasses

    ours, theirs = socket.socketpair()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    seat = dataclasses.replace(seat, control_fd=theirs.fileno())
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads that the child will not have; it uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        become(spec, seat, ground, out_write, err_write, parent)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # in both processes, for whichever comes first
    theirs.close()
    os.close(out_write)
    os.close(err_write)
    for fd in (out_read, err_read):
        os.set_blocking(fd, False)
    pidfd = None
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
    return _Rank(seat.rank, pid, pidfd, Link(ours), out_read, err_read)


class _Watch:
    """The loop of a host process over its ranks and its link to the driver."""

    def __init__(self, link: Link | None) -> None:
        self._ranks: list[_Rank] = []
        self._link = link
        self._selector = selectors.DefaultSelector()
        self._deadline: float | None = None
        self.unsaid: list[Message] = []
        """What rank 0 wrote while there was no link, to travel with the results."""
        if link is not None:
            self._selector.register(link, selectors.EVENT_READ, self._hear)

    def add(self, rank: _Rank) -> None:
        """Watch ``rank`` too."""
        self._ranks.append(rank)
        self._selector.register(rank.control, selectors.EVENT_READ, lambda: self._listen(rank))
        self._selector.register(rank.stdout, selectors.EVENT_READ, lambda: self._read(rank, "stdout"))
        self._selector.register(rank.stderr, selectors.EVENT_READ, lambda: self._read(rank, "stderr"))
        if rank.pidfd is not None:
            self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._reap(rank))

    def until_over(self) -> list[Message]:
        """Serve until every rank has ended, the driver says stop, or a failure has been told; then end what is left."""
        while not all(rank.ended for rank in self._ranks):
            if self._deadline is not None and time.monotonic() >= self._deadline:
                break
            for key, _ in self._selector.select(self._patience()):
                key.data()
            if self._link is not None:
                self._flush(self._link)
            for rank in self._ranks:
                if rank.pidfd is None and not rank.ended:
                    self._reap(rank)
        self.end_all()
        return [rank.report or _stopped(rank.rank) for rank in self._ranks]

    def with_unsaid(self, reports: Sequence[Message]) -> list[Message]:
        """``reports``, rank 0's with its output that no link has carried."""
        return [
            report | {"output": self.unsaid} if report["rank"] == 0 and self.unsaid else report for report in reports
        ]

    def end_all(self) -> None:
        """End every rank with all its children, and take in what they said last."""
        for rank in self._ranks:
            _kill(rank)
            if not rank.ended:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(rank.pid, 0)
                rank.ended = True
            if rank.control.fileno() >= 0:
                self._drain(rank)
                rank.control.close()
                for fd in (rank.stdout, rank.stderr, rank.pidfd):
                    if fd is not None:
                        os.close(fd)
        self._selector.close()

    def _patience(self) -> float | None:
        if any(rank.pidfd is None for rank in self._ranks) or (self._link is not None and self._link.waiting()):
            return _POLL_S
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _hear(self) -> None:
        assert self._link is not None
        try:
            messages = self._link.poll()
        except LinkClosed:
            self._selector.unregister(self._link)
            if self._link.socket.family == socket.AF_UNIX:
                self._deadline = 0.0  # a pair of sockets breaks only when the driver is gone
            # Otherwise a router may have forgotten the connection; Spark ends this process when the driver is gone.
            self._link = None
            return
        if any(message["type"] == "stop" for message in messages):
            self._deadline = 0.0

    def _listen(self, rank: _Rank) -> None:
        try:
            messages = rank.control.poll()
        except LinkClosed:
            with contextlib.suppress(KeyError):
                self._selector.unregister(rank.control)
            return
        for message in messages:
            if message["type"] == "outcome":
                rank.report = message | {"rank": rank.rank}
                if not message["ok"]:
                    self._tell_failure(rank)
            else:
                self._tell(message | {"rank": rank.rank})

    def _read(self, rank: _Rank, stream: str) -> bool:
        fd = rank.stdout if stream == "stdout" else rank.stderr
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
            return False
        rank.tail = (rank.tail + data)[-_TAIL:]
        if rank.rank == 0:
            # latin-1 keeps every byte, also of a character that is cut in two here.
            self._show(stream, data.decode("latin-1"))
        return True

    def say(self, text: str) -> None:
        """Show ``text`` to the user, on standard error."""
        self._show("stderr", text.encode(errors="backslashreplace").decode("latin-1"))

    def _show(self, stream: str, data: str) -> None:
        message = {"type": "log", "rank": 0, "stream": stream, "data": data}
        if self._link is not None:
            self._tell(message)
        elif sum(len(kept["data"]) for kept in self.unsaid) < _UNSAID:
            self.unsaid.append(message)

    def _reap(self, rank: _Rank) -> None:
        pid, status = os.waitpid(rank.pid, os.WNOHANG)
        if pid == 0:
            return
        rank.ended = True
        if rank.pidfd is not None:
            self._selector.unregister(rank.pidfd)
        self._drain(rank)
        if rank.report is None:
            rank.report = _died(rank, status)
            self._tell_failure(rank)
        _kill(rank)  # what it has left behind

    def _drain(self, rank: _Rank) -> None:
        with contextlib.suppress(OSError):
            if rank.report is None:
                self._listen(rank)
        for stream in ("stdout", "stderr"):
            with contextlib.suppress(OSError):
                while self._read(rank, stream):
                    pass

    def _tell_failure(self, rank: _Rank) -> None:
        assert rank.report is not None
        consequence = bool(rank.report.get("consequence"))
        if not consequence:
            self._drain(rank)
            self._tell(rank.report | {"type": "failed"}, sure=True)
        patience = _CONSEQUENCE_S if consequence else (_STOP_S if self._link is not None else 0.0)
        deadline = time.monotonic() + patience
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _flush(self, link: Link) -> None:
        try:
            link.flush()
        except LinkClosed:
            self._link = None

    def _tell(self, message: Message, sure: bool = False) -> None:
        if self._link is None:
            return
        try:
            if sure:
                self._link.send(message)
            else:
                self._link.offer(message)
        except LinkClosed:
            self._link = None


def _kill(rank: _Rank) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, signal.SIGKILL)


def _stopped(rank: int) -> Message:
    return {"type": "outcome", "rank": rank, "ok": False, "stopped": True, "consequence": True}


def _died(rank: _Rank, status: int) -> Message:
    """The report of a rank that ended without one."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        named = number in set(signal.Signals)  # the real-time signals are not
        how = f"was killed by {signal.Signals(number).name if named else f'signal {number}'}"
        if number == signal.SIGKILL:
            how += ", as the system does when memory runs out"
    else:
        how = f"ended by itself with exit status {os.WEXITSTATUS(status)} before the function returned"
    tail = rank.tail.decode(errors="replace")
    return {
        "type": "outcome",
        "rank": rank.rank,
        "ok": False,
        "consequence": False,
        "died": how,
        "error": "RankError",
        "message": f"rank {rank.rank} {how}",
        "traceback": f"its last output:\n{tail}" if tail.strip() else "it wrote nothing before",
    }
