"""``LocalLauncher``: ranks as processes of this machine, forked from a server that has torch imported; no JVM."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import io
import os
import pickle
import platform
import secrets
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Set
from pathlib import Path

from lagom.cluster import Cluster, device_word, hiding, kind_of_device, visible_devices
from lagom.control_groups import available_cores
from lagom.driver.protocol import Outcome
from lagom.driver.run import RunView
from lagom.errors import LagomError
from lagom.host.huge_pages import with_huge_pages
from lagom.plan import Plan
from lagom.program.payload import Parcel, unpack_file
from lagom.program.signature import Call
from lagom.restart.history import RunHistory
from lagom.watch.run_dir import RunRecords
from lagom.wire.framing import anonymous_file, send_with_files
from lagom.wire.messages import RankReport
from lagom.wire.spec import RunSpec

_MAX_RANKS = 960  # this process has an open file for each rank, and the usual limit is 1,024 files
_PATIENCE_S = 4.0
"""Seconds in which the fork server must end by itself before it is killed."""


class LocalLauncher:
    """Runs ranks on this machine, forked by a fork server that is a child of this process."""

    def cluster(self) -> Cluster:
        """Return one slot per GPU or other accelerator, or, without any, per core.

        Raises:
            LagomError: if this Python has no torch.
        """
        if importlib.util.find_spec("torch") is None:
            raise LagomError(f"ranks on this machine need torch, and {sys.executable} has none: pip install torch")
        if devices := visible_devices():
            kind = kind_of_device(devices[0])
            return Cluster(
                launcher="local",
                slots=len(devices),
                gpus_per_slot=1,
                device_kind=kind,
                remedy=f"hide the {device_word(kind)}s from torch with {hiding(kind)} to run on the CPU",
            )
        cores = available_cores()
        return Cluster(launcher="local", slots=cores, oversubscribe=True, most_ranks=_MAX_RANKS)

    def where(self) -> str:
        """Return the place where ranks run, as a text for the user."""
        return "this machine"

    def slots_again(self, wanted: int, wait_s: float = 0.0, cut_off: Set[str] = frozenset()) -> int:
        """Return ``wanted``: a new attempt can always start its processes on this machine."""
        return wanted

    def free_slots(self, running: int, *, one_host: bool) -> int:
        """Return 0: a run never has fewer ranks than it was to have."""
        return 0

    def run(
        self, plan: Plan, call: Call, records: RunRecords | None = None, history: RunHistory | None = None
    ) -> list[Outcome]:
        """See ``Launcher.run``."""
        with contextlib.ExitStack() as stack:
            payload = _file(stack, "payload")
            size = Parcel(call).write(payload.fileno())
            outcomes = [_file(stack, f"outcome-{rank}") for rank in range(plan.world_size)]
            fds = [file.fileno() for file in (payload, *outcomes)]
            spec = spec_of(plan, size)
            if history is not None:
                files, snapshots = history.files_before(), history.snapshots
                spec = dataclasses.replace(spec, files=files, snapshots=snapshots)
            request = pickle.dumps((spec, visible_devices() if plan.gpu else ()))
            try:
                run = self._attempt(plan, request, fds, records, history)
            except _ServerGone:
                run = self._attempt(plan, request, fds, records, history)
            if (lost := run.lost()) is not None:
                raise lost
            reports = run.reports | {report.rank: report for report in run.failures()}
            return [_outcome(rank, reports.get(rank), outcomes[rank]) for rank in range(plan.world_size)]

    def _attempt(
        self, plan: Plan, request: bytes, fds: list[int], records: RunRecords | None, history: RunHistory | None
    ) -> RunView:
        with RunView(plan, self.where(), can_gather=False, records=records, history=history) as run:
            ours, theirs = socket.socketpair()
            with theirs:
                run.adopt(ours)
                taker = server()
                taker.send(request, [theirs.fileno(), *fds])
            run.await_server(taker.process.pid)
            run.watch()
            if run.lost() is not None and not run.begun and taker.ended():
                raise _ServerGone("the local fork server ended before it took up the run")
            return run


class _ServerGone(LagomError):
    """The fork server did not take the run, or ended before the run had begun."""


def _file(stack: contextlib.ExitStack, name: str) -> io.FileIO:
    return stack.enter_context(io.FileIO(anonymous_file(name)))


def spec_of(plan: Plan, payload_size: int) -> RunSpec:
    """Return the spec of a local run for its host process."""
    return RunSpec(
        run_id=secrets.token_hex(8),
        # One host process forks all ranks.
        plan=dataclasses.replace(plan, ranks_per_slot=plan.world_size),
        env=dict(os.environ),
        whole_env=True,
        cwd=os.getcwd(),
        sys_path=tuple(os.path.abspath(entry) for entry in sys.path),
        argv=tuple(sys.argv),
        python=".".join(platform.python_version_tuple()[:2]),
        token="",
        payload_size=payload_size,
        secret=secrets.token_bytes(32),
    )


def _outcome(rank: int, report: RankReport | None, file: io.FileIO) -> Outcome:
    """Return the outcome, which reads ``file``; close ``file``, so that there is never a second one for each rank."""
    report = report or RankReport(rank=rank, ok=False, stopped=True, consequence=True)
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            return Outcome(rank=rank, report=report, load=lambda: {"error": None})
        kept = os.dup(file.fileno())
    load = functools.cache(lambda: unpack_file(kept))
    weakref.finalize(load, os.close, kept)
    return Outcome(rank=rank, report=report, load=load)


class _LocalForkServer:
    """The fork server of this process, which ends with this process."""

    def __init__(self) -> None:
        self._sending = threading.Lock()
        kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, kind)
        self.pid = os.getpid()
        root = str(Path(__file__).parents[2])
        env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lagom.host.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal must not reach the server
                env=with_huge_pages(env),
                cwd="/",
            )

    def alive(self) -> bool:
        """Return whether this process can send requests to the server."""
        return self.pid == os.getpid() and self.process.poll() is None and self._socket.fileno() >= 0

    def ended(self) -> bool:
        """Return whether the server has ended, or ends within half a second."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.5)
        return not self.alive()

    def send(self, request: bytes, fds: list[int]) -> None:
        """Send ``request`` with the descriptors ``fds``.

        Raises:
            _ServerGone: when the server does not accept the request.
        """
        try:
            with self._sending:
                send_with_files(self._socket, request, fds)
        except OSError as error:
            self.close()
            raise _ServerGone(f"the local fork server does not take the run: {error}") from error

    def close(self) -> None:
        """End the server, and all its runs; in a fork of this process only close the socket."""
        self._socket.close()
        if self.pid == os.getpid():
            try:
                self.process.wait(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:  # a busy machine: the server would outlive this process
                self.process.kill()
                self.process.wait()


_server: _LocalForkServer | None = None
_server_lock = threading.Lock()


def server() -> _LocalForkServer:
    """Return the fork server of this process; start one if there is none."""
    global _server  # one per process, kept warm between calls
    with _server_lock:
        if _server is None or not _server.alive():
            _server = _LocalForkServer()
            atexit.register(_server.close)
        return _server


def shut_down() -> None:
    """End the fork server; the next call starts another."""
    global _server  # see server()
    with _server_lock:
        if _server is not None:
            _server.close()
            _server = None
