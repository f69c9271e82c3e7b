"""``run_task``: runs the ranks of a Spark task, called in Spark's Python worker; yields their outcomes as rows."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickle
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lagom.cluster import kind_of_device, other_devices
from lagom.errors import LagomError, PlanError, RankError
from lagom.program.missing_packages import missing_packages, missing_text
from lagom.spark.executor_link import run_in_server, without_torch
from lagom.spark.spark_state import SparkState
from lagom.spark.task_host import ExecutorTask
from lagom.watch.stall_texts import rank_names
from lagom.wire.framing import anonymous_file
from lagom.wire.messages import RankReport, to_json
from lagom.wire.spec import RunSpec

_PART = 4 << 20  # most bytes of data in a row


def run_task(spec: RunSpec, payload: Any = None) -> Iterator[Any]:
    """Run this task's ranks, or trials of a search; yield rows with the outcomes of ranks.

    Args:
        payload: Spark's broadcast of the payload; None if there is none.

    Raises:
        PlanError: if this executor's Python, torch, packages or GPUs do not fit, or Spark has started the task a second
            time.
        RuntimeError: with the first failure in its text, if this task has no link to the driver.
        RankError: if the process that held the ranks was killed, and had no link to the driver.
        LagomError: if this host cannot run ranks or trials; Spark starts a task of trials again, on another host if
            possible.
    """
    from pyspark import BarrierTaskContext, TaskContext

    context: Any = BarrierTaskContext.get() if spec.plan.barrier else TaskContext.get()
    _check(spec, context)
    task = ExecutorTask(
        spec=spec,
        number=context.partitionId(),
        attempt=context.attemptNumber(),
        ip=context.getTaskInfos()[context.partitionId()].address.rsplit(":", 1)[0] if spec.plan.barrier else "",
        gpus=tuple(gpus_of_task(spec, context)),
        spark=SparkState.of_worker(),
        is_broadcast=payload is not None,
    )
    with contextlib.ExitStack() as stack:
        files = {name: anonymous_file(name) for name in task.files}
        for fd in files.values():
            stack.callback(os.close, fd)
        gather: Callable[[str], Sequence[str]] | None = context.allGather if spec.plan.barrier else None
        ended = run_in_server(task, list(files.values()), gather, partial(_write_payload, payload))
        told = pickle.loads(os.pread(files["told"], os.fstat(files["told"]).st_size, 0) or pickle.dumps(None))
        if isinstance(told, BaseException):
            raise told
        if told is None:  # the host process was killed, and had no link by which the driver could notice this
            if spec.plan.searches:
                raise LagomError(f"the process that ran trials on {platform.node()} {ended}")
            raise RankError(
                f"the process that held {rank_names(task.ranks)} on {platform.node()} {ended}", task.ranks[0]
            )
        parts = [_FilePart(rank, name, files[file], report) for rank, name, file, report in told]
        return _rows(parts, stack.pop_all())


def _write_payload(payload: Any, path: str) -> None:
    """Write the content of the broadcast ``payload`` to the file ``path``."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(payload.value)
    vars(payload).pop("_value", None)  # PySpark keeps it there as long as the worker lives


@dataclass(frozen=True, slots=True)
class _FilePart:
    """A file for the driver, with a report; a digest in the report means that the driver has received the file."""

    rank: int
    name: str
    fd: int
    report: RankReport


def _rows(parts: Sequence[_FilePart], files: contextlib.ExitStack) -> Iterator[Any]:
    """Yield the rows of all files, ``_PART`` bytes at a time; close ``files`` at the end."""
    with files:
        for part in parts:
            size = 0 if part.report.sha256 else os.fstat(part.fd).st_size
            for number in range(max(1, -(-size // _PART))):
                data = os.pread(part.fd, _PART, number * _PART) if size else b""
                yield _row(part.rank, part.name, number, data, part.report if number == 0 else None)


def _row(rank: int, name: str, part: int, data: bytes, report: RankReport | None) -> Any:
    import pyarrow

    text = "" if report is None else json.dumps(report, default=to_json)
    columns = {"rank": [rank], "name": [name], "part": [part], "data": [data], "report": [text]}
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
    if importlib.util.find_spec("torch") is None:
        raise PlanError(without_torch("No module named 'torch'"))
    _check_packages(spec)
    if context.attemptNumber() > 0 and not spec.plan.searches:
        raise PlanError("Spark started this task a second time; lagom begins a lost run again by itself, as a whole")


def _check_packages(spec: RunSpec) -> None:
    """Check that this executor has the packages without which no run can succeed; name all that it lacks.

    The user's own modules, which are sent or lie in folders of the driver, are not among the packages.
    """
    missing = missing_packages(spec.plan.packages, spec.shipped)
    if any(package.is_needed for package in missing):
        raise PlanError(missing_text(missing, ships=spec.plan.config.packages == "ship"))


def gpus_of_task(spec: RunSpec, context: Any) -> Sequence[str]:
    """Return this task's accelerators, one or more for each rank, as ``visible_devices`` names them; [] without any.

    Spark calls all of them "gpu" (``spark.task.resource.gpu.amount``).

    Raises:
        PlanError: if Spark gave the task fewer GPUs than it has ranks, or NVIDIA's where torch serves another kind.
    """
    if not spec.plan.gpu:
        return []
    resources = context.resources()
    addresses = list(resources["gpu"].addresses) if "gpu" in resources else []
    if len(addresses) < spec.plan.ranks_per_slot:
        raise PlanError(f"this task was to have {spec.plan.ranks_per_slot} GPUs, and Spark gave it {addresses}")
    if others := other_devices():
        kind = kind_of_device(others[0].name)
        names = [f"{kind}:{address}" for address in addresses]
        if unknown := [name for name in names if name not in {device.name for device in others}]:
            raise PlanError(
                f"Spark gave this task {addresses}, and torch's accelerator there is {kind!r}, with "
                f"{', '.join(device.name for device in others)}, so {unknown[0]!r} is no device; have the discovery "
                "script of the resource 'gpu' print the numbers of these devices, or, if it prints NVIDIA's GPUs, set "
                "TORCH_DEVICE_BACKEND_AUTOLOAD=0 on the executors, with which torch does not load the other kind"
            )
        return names
    return [visible(address, os.environ.get("CUDA_VISIBLE_DEVICES", "")) for address in addresses]


def visible(address: str, mask: str) -> str:
    """Return the GPU with Spark's ``address`` as an entry for CUDA_VISIBLE_DEVICES.

    Args:
        address: an index into the devices that the executor sees; or a UUID or MIG name, which is valid anywhere.
        mask: CUDA_VISIBLE_DEVICES of the executor; "" if it sees all devices.
    """
    shown = [entry.strip() for entry in mask.split(",") if entry.strip()]
    if re.fullmatch(r"\d+", address) and int(address) < len(shown) and address not in shown:
        return shown[int(address)]
    return address
