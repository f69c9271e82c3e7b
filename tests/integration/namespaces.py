"""``NamespaceLauncher``: ranks on hosts of ``hosts.py`` or ``slow_network.py``, as on Spark's executors, without Spark.

Each host has a process that is forked from this one, as soon as the launcher is made, and forks the tasks of each run.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import socket
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from typing import Any

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.driver.run import RunView
from lagom.host.descendants import fork_host
from lagom.plan import Plan, plan
from lagom.program.signature import Call
from lagom.spark import task_host
from lagom.spark.spark import SparkLauncher
from lagom.spark.spark_state import SparkState
from lagom.spark.task_host import ExecutorTask
from lagom.wire.framing import anonymous_file
from lagom.wire.messages import to_json
from lagom.wire.spec import RunSpec
from tests.integration.hosts import Host

_CLONE_NEWNET = 0x40000000


class _Facts:
    """The facts of a Spark session that a launcher asks for."""

    name = "namespaces"
    one_machine = broadcasts = False
    advertise = None
    encrypts = True

    def __init__(self, address: str, slots: int, *, encrypted: bool) -> None:
        self.bind = address
        self._cluster = Cluster(launcher="spark", slots=slots, encrypted=encrypted)

    def cluster(self) -> Cluster:
        return self._cluster


class NamespaceLauncher(SparkLauncher):
    """Runs ``num_ranks`` ranks on each of ``hosts``."""

    def __init__(self, address: str, hosts: Sequence[Host], num_ranks: int, *, encrypted: bool = False) -> None:
        import lagom.host.preload  # noqa: F401  (as the fork servers do)

        self._num_ranks = num_ranks
        self.facts: Any = _Facts(address, len(hosts) * num_ranks, encrypted=encrypted)
        self._told: list[Connection] = []
        self._pids: list[int] = []
        for host in hosts:
            ours, theirs = Pipe()
            self._told.append(ours)
            self._pids.append(fork_host(lambda host=host, theirs=theirs: _serve(host, theirs)))  # type: ignore[misc]
            theirs.close()

    def close(self) -> None:
        """End the processes of the hosts."""
        self._end_hosts()
        for pid, told in zip(self._pids, self._told, strict=True):
            os.waitpid(pid, 0)
            told.close()

    def _end_hosts(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGTERM)

    def call(self, function: Any, *, distributed: bool = False, **config: Any) -> list[Any]:
        """Return what ``function`` returns on each rank, or raise the first failure; the run begins only once.

        Args:
            distributed: whether the function begins a process group itself.
        """
        settings = TorchDistributedConfig(world_size=len(self._told) * self._num_ranks, run_dir=None, **config)
        the_plan = plan(settings, self.facts.cluster(), already_distributed=distributed)
        found = self.run(the_plan, Call(function=function, provided=dict(settings.hparams)))
        for outcome in sorted(found, key=lambda one: one.report.order):
            if not outcome.report.ok and not outcome.report.consequence:
                raise outcome.load()["error"] or RuntimeError(outcome.report.traceback)
        return [outcome.load()["value"] for outcome in found]

    def run_job(
        self, run: RunView, plan: Plan, spec: RunSpec, stack: contextlib.ExitStack, payload: Any = None
    ) -> Sequence[Any]:
        """Have each host run its tasks, and return their rows."""
        rows: list[Any] = []

        def collect() -> None:
            with contextlib.suppress(EOFError, ConnectionResetError):  # a host was ended
                for told in self._told:
                    rows.extend(told.recv())
            run.finish()

        for i, told in enumerate(self._told):
            told.send((pickle.dumps(spec), range(i * self._num_ranks, (i + 1) * self._num_ranks)))
        collecting = threading.Thread(target=collect)
        collecting.start()
        stack.callback(collecting.join)
        run.watch()
        if run.stopped:  # a host that is cut off would notice late
            self._end_hosts()
        collecting.join()
        if (lost := run.lost()) is not None:
            raise lost
        return rows


@contextmanager
def launcher(address: str, hosts: Sequence[Host], num_ranks: int, *, encrypted: bool = False) -> Iterator[Any]:
    """A ``NamespaceLauncher`` that is closed after its use."""
    made = NamespaceLauncher(address, hosts, num_ranks, encrypted=encrypted)
    try:
        yield made
    finally:
        made.close()


def _serve(host: Host, told: Connection) -> None:
    """Be ``host``: run its tasks of one run after another."""
    with open(f"/run/netns/{host.name}") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {host.name}")
    task_host.DIAL_S = 30.0  # where packets are lost: no task may do without its link, as there is no Spark to ask
    with contextlib.suppress(EOFError, ConnectionResetError), tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        while (asked := told.recv()) is not None:
            spec, numbers = asked
            rows = []
            for task in [_Task(host, pickle.loads(spec), number) for number in numbers]:
                rows += task.rows()
            told.send(rows)


class _Task:
    """A task of one rank, in a process of its own."""

    def __init__(self, host: Host, spec: RunSpec, number: int) -> None:
        self._task = ExecutorTask(
            spec=spec,
            number=number,
            attempt=0,
            ip=host.address,
            gpus=(),
            spark=SparkState(files="", context=b""),
        )
        self._files = {name: anonymous_file(name) for name in self._task.files}
        self._pid = fork_host(self._run)

    def _run(self) -> None:
        self._task.run(list(self._files.values()), lambda _: [], lambda _: None)

    def rows(self) -> list[dict[str, Any]]:
        """Wait for its end; return its outcomes."""
        os.waitpid(self._pid, 0)
        told = pickle.loads(_content(self._files["told"]) or pickle.dumps([]))
        if isinstance(told, BaseException):
            warnings.warn(f"a task on {socket.gethostname()} has failed: {told}", stacklevel=2)
            told = []
        found = [
            {
                "rank": rank,
                "name": name,
                "part": 0,
                "data": _content(self._files[file]),
                "report": json.dumps(report, default=to_json),
            }
            for rank, name, file, report in told
        ]
        for fd in self._files.values():
            os.close(fd)
        return found


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)
