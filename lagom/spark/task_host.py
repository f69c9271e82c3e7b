"""``run``: the main function of a Spark task's host process: connects to the driver, runs ranks, reports outcomes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import platform
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lagom.errors import LagomError
from lagom.extensions.registry import host_server
from lagom.host.end_reports import first_failure, fit_reports
from lagom.host.rank_host import run_task_ranks
from lagom.host.workspace import host_workspace, pack_files
from lagom.on_rank.network_interfaces import own_address
from lagom.on_rank.rank_environment import set_environment
from lagom.patching.importers import on_import
from lagom.spark.spark_state import SparkState
from lagom.watch.messages import Timeline
from lagom.wire.client import DriverClient, LinkClosed, deliver, dial
from lagom.wire.failure_text import failure_text
from lagom.wire.messages import (
    Done,
    Gathered,
    GatherRequest,
    Log,
    Lost,
    PayloadRequest,
    PayloadWritten,
    RankReport,
    TaskHello,
    own_version,
    to_json,
)
from lagom.wire.rendezvous import Stopped
from lagom.wire.spec import RunSpec

DIAL_S = 1.0
_SEARCH_DIAL_S = 5.0
_GATHER_S = 3600.0
_BROADCAST_S = 3600.0
_ATTEMPT = 1_000_000
"""Difference between the slot numbers of two attempts of the same task."""
_INLINE = 8 << 20  # bytes; larger outcomes go to the driver by a connection, since Spark's results must fit its heap
_MAX_FAILURE = 1 << 20  # most bytes of a pickled exception in an error text
_MAX_TIMELINE = 1 << 16  # most bytes of timelines in an error text, which Spark logs several times
_FileReport = tuple[int, str, str, RankReport]
"""Rank, kind of file for the driver, name of the file, and report; with kind "files" only its digest counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorTask:
    """The facts of a Spark task that its host process needs."""

    spec: RunSpec
    number: int
    attempt: int
    ip: str
    """Spark's address of the task's host, which may be a name; empty outside of barrier jobs."""
    gpus: tuple[str, ...]
    """The accelerator of each rank, as ``visible_devices`` names it."""
    spark: SparkState
    is_broadcast: bool = False
    """Whether Spark has broadcast the payload to this executor."""

    @property
    def files(self) -> Sequence[str]:
        """Names of the task's files, in order: "told" for the result of ``run``, outcomes, and "files" for rank 0."""
        if self.spec.plan.searches:
            return ["told"]
        return ["told", *(f"outcome-{rank}" for rank in self.ranks), *["files"] * (0 in self.ranks)]

    def run(
        self,
        files: Sequence[int],
        gather: Callable[[str], Sequence[str]],
        take_payload: Callable[[str], None],
    ) -> None:
        """Run the ranks, or trials of a search, and write the results into the files.

        Args:
            files: descriptors of the files that the property ``files`` names, in the same order.
            gather: sends the text of this task to all tasks of the stage, and returns their texts.
            take_payload: writes the payload that Spark has broadcast to the file with the given path.
        """
        take = take_payload if self.is_broadcast else None
        by_name = dict(zip(self.files, files, strict=True))
        with on_import({"pyspark": self.spark.restore}):
            told = _serve_slot(self, take) if self.spec.plan.searches else _run(self, by_name, gather, take)
        os.ftruncate(by_name["told"], 0)
        os.pwrite(by_name["told"], pickle.dumps(told), 0)

    @property
    def ranks(self) -> Sequence[int]:
        """Numbers of the task's ranks."""
        first = self.number * self.spec.plan.ranks_per_slot
        return range(first, min(first + self.spec.plan.ranks_per_slot, self.spec.plan.world_size))


def run(fds: Sequence[int]) -> None:
    """Run a task. ``fds`` are a file with the pickled task, a socket to its Python worker, and the task's files."""
    with os.fdopen(fds[0], "rb") as file:
        file.seek(0)
        worker, task = pickle.load(file)
    set_environment(worker["env"])
    os.chdir(worker["cwd"])
    sys.path[:] = worker["sys_path"]
    asks = DriverClient(socket.socket(fileno=fds[1]))
    task.run(fds[2:], lambda text: _gathered(asks, text), lambda path: _ask_for_payload(asks, path))


def _ask_for_payload(asks: DriverClient, path: str) -> None:
    """Have the worker write the payload, which only Spark's Python worker can get, to the file ``path``."""
    asks.send(PayloadRequest(path=path))
    if not isinstance(asks.receive(_BROADCAST_S), PayloadWritten):
        raise LagomError(f"Spark's broadcast did not bring the data of the call within {_BROADCAST_S:g} s")


def _gathered(asks: DriverClient, text: str) -> Sequence[str]:
    """Return the texts of all tasks of the stage, with ``text`` as this task's; the worker calls Spark's allGather."""
    asks.send(GatherRequest(text=text))
    reply = asks.receive(_GATHER_S)
    if not isinstance(reply, Gathered):
        raise LagomError(f"Spark gathered nothing from the other tasks for {_GATHER_S:g} s")
    return reply.texts


def _run(
    task: ExecutorTask,
    files: Mapping[str, int],
    gather: Callable[[str], Sequence[str]],
    take_payload: Callable[[str], None] | None,
) -> Sequence[_FileReport] | Exception:
    """Run the ranks; return the files for the driver with their reports, or the exception that the task raises."""
    spec, link = task.spec, None
    try:
        if spec.address is not None:
            hello = TaskHello(task=task.number, version=own_version())
            link = dial(spec.address, spec.secret, hello, DIAL_S, spec.certificate)
        if link is not None:
            # If this process is killed, the driver notices it by the link: the worker then need not raise an error.
            os.pwrite(files["told"], pickle.dumps([]), 0)
        return _run_ranks(task, link, gather if spec.plan.barrier else None, files, take_payload)
    except Stopped:
        return []
    except Exception as error:
        if link is None:
            return error
        with contextlib.suppress(OSError):
            link.send(Lost(message=f"{type(error).__name__}: {error}"))
        return []
    finally:
        if link is not None:
            link.close()


def _serve_slot(task: ExecutorTask, take_payload: Callable[[str], None] | None) -> Sequence[_FileReport] | Exception:
    """Run trials until the search is over or the driver has ended; return an error if this host cannot run trials."""
    spec, slot = task.spec, task.attempt * _ATTEMPT + task.number
    assert spec.address is not None
    try:
        hello = TaskHello(task=slot, version=own_version())
        link = dial(spec.address, spec.secret, hello, _SEARCH_DIAL_S, spec.certificate)
        if link is None:
            host, port = spec.address
            raise LagomError(f"{platform.node()} cannot reach the driver at {host}:{port}, which hands out the trials")
        with contextlib.closing(link), host_workspace(spec, take_payload=take_payload) as place:
            ip = own_address(link.socket.getsockname()[0], spec.env)
            serve = host_server(spec.plan)
            assert serve is not None
            serve(spec, slot, place, link, ip, task.gpus)
    except LinkClosed:
        pass  # the driver has ended
    except Exception as error:
        return LagomError(str(error))
    return []


def _run_ranks(
    task: ExecutorTask,
    link: DriverClient | None,
    gather: Callable[[str], Sequence[str]] | None,
    fds: Mapping[str, int],
    take_payload: Callable[[str], None] | None,
) -> list[_FileReport]:
    spec, ranks = task.spec, task.ranks
    outcomes = [fds[f"outcome-{rank}"] for rank in ranks]
    ip = own_address(link.socket.getsockname()[0] if link else task.ip, spec.env)
    with host_workspace(spec, take_payload=take_payload) as place:
        reports = run_task_ranks(spec, task.number, place, link, gather, outcomes, ip, task.gpus)
        # Raise only without a link to the driver. With a link, the driver itself ends the run: a task that raises
        # fills Spark's log, and the job's failure would lose the reports of other tasks, one of which may be the cause.
        if link is None and (failed := first_failure(reports)) is not None:
            raise RuntimeError(failure_as_text(failed, outcomes[failed.rank - ranks[0]], reports))
        found = [(rank, "outcome", f"outcome-{rank}", report) for rank, report in zip(ranks, reports, strict=True)]
        if 0 in ranks and pack_files(place, fds["files"]):
            found.append((0, "files", "files", RankReport(rank=0, ok=True)))
        told = [
            (rank, name, file, _deliver_if_large(spec, rank, name, fds[file], said)) for rank, name, file, said in found
        ]
        if link is not None:
            link.send(Done(reports=fit_reports(reports)))
        return told


def failure_as_text(report: RankReport, fd: int, reports: Sequence[RankReport]) -> str:
    size = os.fstat(fd).st_size
    error = os.pread(fd, size, 0) if size <= _MAX_FAILURE else b""
    logs = [said for said in report.output if isinstance(said, Log)]
    summary = dataclasses.replace(report, traceback=report.traceback[-20_000:], output=list(logs))
    timelines = json.dumps(fitting_timelines(reports), default=to_json)
    told = failure_text(json.dumps(summary, default=to_json), error, timelines)
    return f"rank {report.rank}: {report.error}: {report.message}\n{told}"


def fitting_timelines(reports: Sequence[RankReport]) -> list[Timeline]:
    """Return the latest blocks of the ranks' timelines that fit into an error text; they show how the run ended."""
    of_ranks = [[said for said in one.output if isinstance(said, Timeline)] for one in reports]
    found: list[Timeline] = []
    left = _MAX_TIMELINE
    for blocks in itertools.zip_longest(*map(reversed, of_ranks)):
        for block in blocks:
            if block is not None and len(block.data) <= left:
                found.insert(0, block)
                left -= len(block.data)
    return found


def _deliver_if_large(spec: RunSpec, rank: int, name: str, fd: int, report: RankReport) -> RankReport:
    """Send a large file to the driver; return ``report``, with the file's digest if the file has arrived there."""
    if os.fstat(fd).st_size <= _INLINE or spec.address is None:
        return report
    digest = deliver(spec.address, spec.secret, f"{name}-{rank}", fd, 60.0, spec.certificate)
    return report if digest is None else dataclasses.replace(report, sha256=digest)
