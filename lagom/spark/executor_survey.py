"""``look_around``: reports the Python of a Spark task and the hosts that it reaches; needs no torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lagom.errors import PlanError
from lagom.on_rank.network_interfaces import interface_of, own_address
from lagom.program.missing_packages import is_importable

_DIAL_S = 3.0
_MAX_PEERS = 32
"""Most hosts that a task dials. With more hosts, each task dials different ones, so that each host is dialled."""


def look_around(
    driver: tuple[str, int] | None, barrier: bool, env: Mapping[str, str], packages: Mapping[str, str]
) -> Iterator[Any]:
    """Yield one row of ``SURVEY_SCHEMA`` (spark/spark_task.py) with the facts of this task, as JSON.

    Args:
        driver: the address on which the driver listens; None if it has no address.
        barrier: whether all tasks run at the same time, so that they can dial each other.
        env: the variables that the driver's program has set in its environment.
        packages: the distributions of the packages to look for, by the names of their modules.
    """
    import pyarrow
    from pyspark import BarrierTaskContext, TaskContext

    context: Any = BarrierTaskContext.get() if barrier else TaskContext.get()
    facts: dict[str, Any] = {
        "task": context.partitionId(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": _version("torch"),
        "packages": {
            name: (_version(distribution) or "") if is_importable(name) else None
            for name, distribution in packages.items()
        },
    }
    if barrier:
        facts |= _reach(context, driver, env)
    schema = pyarrow.schema([("task", pyarrow.int32()), ("facts", pyarrow.string())])
    columns = {"task": [facts["task"]], "facts": [json.dumps(facts)]}
    yield pyarrow.RecordBatch.from_pydict(columns, schema=schema)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _reach(context: Any, driver: tuple[str, int] | None, env: Mapping[str, str]) -> dict[str, Any]:
    """Return this task's address, and whether it could reach the driver and other hosts, with the reasons if not.

    All tasks of the stage call this together.
    """
    ip, why, to_driver = None, "", None
    listener = None
    with contextlib.ExitStack() as stack:
        try:
            spark = context.getTaskInfos()[context.partitionId()].address.rsplit(":", 1)[0]
            reached, to_driver = _towards(driver)
            ip = own_address(reached or spark, env)
            listener = stack.enter_context(socket.create_server((ip, 0), backlog=1024))
            # Nobody calls ``accept``: the kernel completes connections up to the backlog by itself.
        except (OSError, PlanError) as error:
            why = str(error)
        address = list(listener.getsockname()[:2]) if listener is not None else None
        mine = {"task": context.partitionId(), "host": socket.gethostname(), "address": address}
        everyone = [json.loads(text) for text in context.allGather(json.dumps(mine))]
        unreached = dial_all(peers_to_dial(mine, everyone))
        context.allGather("")  # no task closes its listener before all have dialled
    return {
        "ip": ip,
        "interface": interface_of(ip) if ip is not None else None,
        "no_address": why,
        "driver": to_driver,
        "dialled": len(peers_to_dial(mine, everyone)),
        "unreached": unreached,
    }


def _towards(driver: tuple[str, int] | None) -> tuple[str | None, str | None]:
    """Return the address from which this host reaches the driver, and "" or the error; twice None without a driver."""
    if driver is None:
        return None, None
    try:
        with socket.create_connection(driver, timeout=_DIAL_S) as connection:
            return connection.getsockname()[0], ""
    except OSError as error:
        return None, str(error)


def peers_to_dial(mine: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the tasks to dial: one on each other host, on at most ``_MAX_PEERS``, from the task after this one on."""
    ordered = sorted(everyone, key=lambda one: ((one["task"] - mine["task"]) % (len(everyone) * 2), one["task"]))
    by_host: dict[str, Mapping[str, Any]] = {}
    for one in ordered:
        if one["host"] != mine["host"] and one["address"] is not None:
            by_host.setdefault(one["host"], one)
    return list(by_host.values())[:_MAX_PEERS]


def dial_all(peers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Dial all ``peers`` at once; return the peers that do not answer, with the reasons."""
    failed: list[dict[str, Any]] = []

    def dial(peer: Mapping[str, Any]) -> None:
        host, port = peer["address"]
        try:
            with socket.create_connection((host, port), timeout=_DIAL_S):
                pass
        except OSError as error:
            late = isinstance(error, TimeoutError)
            why = f"no answer within {_DIAL_S:.0f} s" if late else os.strerror(error.errno or 0).lower()
            failed.append({"host": peer["host"], "address": f"{host}:{port}", "why": why})

    threads = [threading.Thread(target=dial, args=(peer,), daemon=True) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(failed, key=lambda one: str(one["host"]))
