"""A Spark executor's part in a run: workspace, link to the driver, ranks, and their outcomes as rows."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import platform
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lagom.errors import LagomError, PlanError, RankError
from lagom.host.descendants import adopt_orphans, end_descendants, fork_host
from lagom.host.rank_host import run_task_ranks
from lagom.host.trial_host import serve_trials
from lagom.host.workspace import host_workspace, pack_files, remove_leftovers
from lagom.monitor.stalls import rank_names
from lagom.wire.client import DriverClient, LinkClosed, Message, deliver, dial
from lagom.wire.failure_text import failure_text
from lagom.wire.rendezvous import Stopped
from lagom.wire.server import anonymous_file
from lagom.wire.spec import RunSpec
from lagom.worker.network_interfaces import own_address
from lagom.worker.process_tree import children

_DIAL_S = 1.0
_SEARCH_DIAL_S = 5.0
_ATTEMPT = 1_000_000
"""Distance of the slot numbers of two attempts of a task."""
_INLINE = 8 << 20  # bytes; larger outcomes go to the driver by a connection, as Spark's results have to fit its heap
_PART = 4 << 20  # bytes of a row
_MAX_FAILURE = 1 << 20  # bytes of a pickled exception in an error text
_MAX_TIMELINE = 1 << 16  # bytes of timelines in an error text: Spark logs the text, and several times


def run_task(spec: RunSpec) -> Iterator[Any]:
    """Run this task's ranks in a host process; yield rows with their outcomes.

    Raises:
        RuntimeError: with the first failure in its text, if this task has no link to the driver.
    """
    from pyspark import BarrierTaskContext, TaskContext

    context: Any = BarrierTaskContext.get() if spec.plan.barrier else TaskContext.get()
    _check(spec, context)
    if spec.plan.searches:
        return _run_slot(spec, context)
    ranks = _ranks(spec, context.partitionId())
    with contextlib.ExitStack() as files:
        names = [f"outcome-{rank}" for rank in ranks] + ["files"] * (0 in ranks)
        fds = {name: anonymous_file(name) for name in (*names, "told")}
        for fd in fds.values():
            files.callback(os.close, fd)
        ended = _run_below(lambda: _record_run(fds["told"], spec, context, fds))
        told = pickle.loads(os.pread(fds["told"], os.fstat(fds["told"]).st_size, 0) or pickle.dumps(None))
        if isinstance(told, BaseException):
            raise told
        if told is None:  # the host process was killed; a driver with a link to it sees that
            raise RankError(f"the process that held {rank_names(ranks)} on {platform.node()} {ended}", ranks[0])
        parts = [_Part(rank, name, fds[file], report) for rank, name, file, report in told]
        return _rows(parts, files.pop_all())


def _ranks(spec: RunSpec, task: int) -> Sequence[int]:
    first = task * spec.plan.ranks_per_slot
    return range(first, min(first + spec.plan.ranks_per_slot, spec.plan.world_size))


def _run_below(function: Callable[[], None]) -> str:
    """Run ``function`` in a host process; return how that process ended. See Note [Descendants] in descendants.py."""
    before = children(os.getpid())
    adopt_orphans(True)
    try:
        pid = fork_host(function)
        _, status = os.waitpid(pid, 0)
        if status != 0:
            end_descendants(before)
            remove_leftovers()
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "ended"
    finally:
        adopt_orphans(False)


def _record_run(told_fd: int, spec: RunSpec, context: Any, fds: Mapping[str, int]) -> None:
    """Run the ranks; write the list of files with their reports, or the exception to raise, to ``told_fd``."""
    told: Any
    task = context.partitionId()
    link = None
    try:
        if spec.address is not None:
            link = dial(spec.address, spec.secret, {"purpose": "task", "task": task}, _DIAL_S, spec.certificate)
        if link is not None:
            os.pwrite(told_fd, pickle.dumps([]), 0)
        told = _run_ranks(spec, task, context, link, fds)
    except Stopped:
        told = []
    except Exception as error:
        told = error
        if link is not None:
            told = []
            with contextlib.suppress(OSError):
                link.send({"type": "lost", "message": f"{type(error).__name__}: {error}"})
    finally:
        if link is not None:
            link.close()
    os.ftruncate(told_fd, 0)
    os.pwrite(told_fd, pickle.dumps(told), 0)


def _run_slot(spec: RunSpec, context: Any) -> Iterator[Any]:
    """Run trials of a search in a host process until the driver says that the search is over; return no rows.

    Raises:
        LagomError: if this host cannot run trials; Spark then starts the task again, elsewhere if it can.
    """
    told = anonymous_file("told")
    try:
        ended = _run_below(lambda: _serve_slot(spec, context, told))
        if why := os.pread(told, _MAX_FAILURE, 0).decode():
            raise LagomError(why)
        if ended != "ended":
            raise LagomError(f"the process that ran trials on {platform.node()} {ended}")
    finally:
        os.close(told)
    return iter(())


def _serve_slot(spec: RunSpec, context: Any, told: int) -> None:
    """Run trials; write the reason to the file ``told`` if that is not possible here."""
    assert spec.address is not None
    slot = context.attemptNumber() * _ATTEMPT + context.partitionId()
    try:
        link = dial(spec.address, spec.secret, {"purpose": "task", "task": slot}, _SEARCH_DIAL_S, spec.certificate)
        if link is None:
            host, port = spec.address
            raise LagomError(f"{platform.node()} cannot reach the driver at {host}:{port}, which hands out the trials")
        with contextlib.closing(link), host_workspace(spec) as place:
            ip = own_address(link.socket.getsockname()[0], spec.env)
            serve_trials(spec, slot, place, link, ip, gpus_of_task(spec, context))
    except LinkClosed:
        pass  # the driver has ended
    except Exception as error:
        os.pwrite(told, str(error).encode(errors="replace"), 0)


_FileReport = tuple[int, str, str, "Message"]
"""Rank, kind of file for the driver, name of the file, and report."""


def _run_ranks(
    spec: RunSpec, task: int, context: Any, link: DriverClient | None, fds: Mapping[str, int]
) -> list[_FileReport]:
    ranks = _ranks(spec, task)
    gather = (lambda text: context.allGather(text)) if spec.plan.barrier else None
    outcomes = [fds[f"outcome-{rank}"] for rank in ranks]
    ip = link.socket.getsockname()[0] if link else context.getTaskInfos()[task].address.rsplit(":", 1)[0]
    ip = own_address(ip, spec.env)
    with host_workspace(spec) as place:
        reports = run_task_ranks(spec, task, place, link, gather, outcomes, ip, gpus_of_task(spec, context))
        failed = [report for report in reports if not report["ok"] and not report.get("stopped")]
        # A driver that has a link to this task ends the run itself, and quietly: a task that raises fills Spark's log,
        # and the job's failure would lose the reports of other tasks, which may have the cause.
        if failed and link is None:
            raise RuntimeError(failure_as_text(failed[0], outcomes[failed[0]["rank"] - ranks[0]], reports))
        found = [(rank, "outcome", f"outcome-{rank}", report) for rank, report in zip(ranks, reports, strict=True)]
        if 0 in ranks and pack_files(place, fds["files"]):
            found.append((0, "files", "files", {}))
        told = [
            (rank, name, file, _deliver_if_large(spec, rank, name, fds[file], said)) for rank, name, file, said in found
        ]
        if link is not None:
            link.send({"type": "done", "reports": reports})
        return told


@dataclass(frozen=True, slots=True)
class _Part:
    """A file for the driver and its report; a report with a digest says that the driver has the file already."""

    rank: int
    name: str
    fd: int
    report: Message


def failure_as_text(report: Message, fd: int, reports: Sequence[Message]) -> str:
    size = os.fstat(fd).st_size
    error = os.pread(fd, size, 0) if size <= _MAX_FAILURE else b""
    summary = {key: report[key] for key in report if key != "traceback"} | {"traceback": report["traceback"][-20_000:]}
    if "output" in summary:
        summary["output"] = [said for said in summary["output"] if said["type"] not in ("timeline", "picture")]
    told = failure_text(json.dumps(summary), error, json.dumps(fitting_timelines(reports)))
    return f"rank {report['rank']}: {report['error']}: {report['message']}\n{told}"


def fitting_timelines(reports: Sequence[Message]) -> list[Message]:
    """Select the latest blocks of the ranks' timelines that fit into an error text: they show how the run ended."""
    of_ranks = [[said for said in one.get("output", []) if said["type"] == "timeline"] for one in reports]
    found: list[Message] = []
    left = _MAX_TIMELINE
    for blocks in itertools.zip_longest(*map(reversed, of_ranks)):
        for block in blocks:
            if block is not None and len(block["data"]) <= left:
                found.insert(0, block)
                left -= len(block["data"])
    return found


def _deliver_if_large(spec: RunSpec, rank: int, name: str, fd: int, report: Message) -> Message:
    """Return ``report``; a large file is sent to the driver first, and the file's digest is added if it arrived."""
    if os.fstat(fd).st_size <= _INLINE or spec.address is None:
        return report
    digest = deliver(spec.address, spec.secret, f"{name}-{rank}", fd, 60.0, spec.certificate)
    return report if digest is None else report | {"sha256": digest}


def _rows(parts: Sequence[_Part], files: contextlib.ExitStack) -> Iterator[Any]:
    """Yield the rows of all files for Spark, a part at a time; close ``files`` at the end."""
    with files:
        for part in parts:
            size = 0 if "sha256" in part.report else os.fstat(part.fd).st_size
            for number in range(max(1, -(-size // _PART))):
                data = os.pread(part.fd, _PART, number * _PART) if size else b""
                yield _row(part.rank, part.name, number, data, part.report if number == 0 else {})


def _row(rank: int, name: str, part: int, data: bytes, report: Message) -> Any:
    import pyarrow

    columns = {"rank": [rank], "name": [name], "part": [part], "data": [data], "report": [json.dumps(report)]}
    schema = pyarrow.schema(
        [
            ("rank", pyarrow.int32()),
            ("name", pyarrow.string()),
            ("part", pyarrow.int32()),
            ("data", pyarrow.binary()),
            ("report", pyarrow.string()),
        ]
    )
    return pyarrow.RecordBatch.from_pydict(columns, schema=schema)


def _check(spec: RunSpec, context: Any) -> None:
    python = ".".join(platform.python_version_tuple()[:2])
    if python != spec.python:
        raise PlanError(
            f"the driver runs Python {spec.python}, this executor {python}; set PYSPARK_PYTHON to the same one"
        )
    try:
        with _quiet_sockets():
            import torch  # noqa: F401
    except ImportError as error:
        raise PlanError(
            f"the executor on {platform.node()} has no torch ({error}); its Python is {sys.executable}: "
            "install torch there, or set PYSPARK_PYTHON to a Python that has it"
        ) from error
    from lagom.host import preload  # imported once per Spark worker; forked ranks inherit the imports

    preload.look_at_loaded()  # Spark loads pandas later
    if context.attemptNumber() > 0 and not spec.plan.searches:
        raise PlanError("Spark started this task a second time; lagom begins a lost run again by itself, as a whole")


@contextlib.contextmanager
def _quiet_sockets() -> Iterator[None]:
    """Silence torch's warning about hosts without a name at each connection; torch reads the setting once."""
    name = "TORCH_CPP_LOG_LEVEL"
    chosen = os.environ.get(name)
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if chosen is None:
            del os.environ[name]


def gpus_of_task(spec: RunSpec, context: Any) -> Sequence[str]:
    """Return one GPU address per rank of this task, in the form of CUDA_VISIBLE_DEVICES."""
    if not spec.plan.gpu:
        return []
    resources = context.resources()
    addresses = list(resources["gpu"].addresses) if "gpu" in resources else []
    if len(addresses) < spec.plan.ranks_per_slot:
        raise PlanError(f"this task was to have {spec.plan.ranks_per_slot} GPUs, and Spark gave it {addresses}")
    return [visible(address, os.environ.get("CUDA_VISIBLE_DEVICES", "")) for address in addresses]


def visible(address: str, mask: str) -> str:
    """Return ``address`` as CUDA names it if the executor sees only the devices of ``mask``.

    Spark's addresses are indices into the devices that the executor sees, or UUIDs or MIG names, which are valid
    anywhere.
    """
    shown = [entry.strip() for entry in mask.split(",") if entry.strip()]
    if re.fullmatch(r"\d+", address) and int(address) < len(shown) and address not in shown:
        return shown[int(address)]
    return address
