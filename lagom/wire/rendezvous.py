"""Rendezvous of a run's tasks: each sends its facts, and all get the same table back."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from lagom.errors import PlanError
from lagom.wire.client import DriverClient, LinkClosed, Message

WAIT_S = 600.0
"""Longest time in seconds that a task waits for the other tasks to start."""
LEAVE_S = 1.0
"""Seconds in which other ranks can end after one has called ``sys.exit`` or pruned its trial: rank 0 may be writing."""
WRITE_S = 1.0
"""Seconds in which rank 0 can raise as well and finish its writes, after another rank has raised, on busy cores too."""


class Stopped(Exception):
    """Raised in a host process when the driver has ended the run before all tasks had joined."""


def peers(joins: Sequence[Message], in_clear: str = "") -> Message:
    """Build the table of all ranks from the tasks' joins.

    Args:
        in_clear: name of a library that would send unencrypted between hosts, which is not allowed in this run: ranks
            on several hosts are then an error. "" if there is none.

    Raises:
        PlanError: if tasks differ in the version of Python or torch, or ranks of several hosts would use ``in_clear``.
    """
    ordered = sorted(joins, key=lambda join: int(join["task"]))
    for fact in ("python", "torch"):
        versions = {str(join[fact]): str(join["host"]).split("|")[0] for join in ordered}
        if len(versions) > 1:
            found = ", ".join(f"{version} on {host}" for version, host in versions.items())
            raise PlanError(f"the executors have different versions of {fact}: {found}; give all of them the same")
    hosts = sorted({str(join["host"]) for join in ordered})
    if in_clear and len(hosts) > 1:
        names = ", ".join(host.split("|")[0] for host in hosts[:4])
        raise PlanError(
            f"Spark encrypts what it sends, and the ranks are on {len(hosts)} hosts ({names}), between which "
            f"{in_clear} would send gradients and data in clear. Have all ranks on one host; or, where that network "
            "may carry it (it is private, or encrypted itself), set allow_unencrypted_collectives=True"
        )
    ranks = [
        {"rank": rank, "host": join["host"], "ip": join["ip"], "gpu": gpu}
        for join in ordered
        for rank, gpu in zip(join["ranks"], join["gpus"] or [None] * len(join["ranks"]), strict=True)
    ]
    shared = len({(rank["host"], rank["gpu"]) for rank in ranks}) < len(ranks)
    # A task with another address is in another network namespace, even if it sees the same files.
    near = len({(rank["host"], rank["ip"]) for rank in ranks}) == 1
    return {"type": "peers", "store": None if near else ordered[0]["store"], "ranks": ranks, "nccl": not shared}


def other_torch(joins: Sequence[Message]) -> str:
    """Return a line that says that this process, the driver, has another version of torch than the tasks.

    It is "" if the versions are equal up to the last number, or the driver has no torch.
    """
    try:
        own = (importlib.metadata.version("torch") or "").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""
    theirs = str(joins[0]["torch"])
    if not own or own.split(".")[:2] == theirs.split(".")[:2]:
        return ""
    return (
        f"the driver has torch {own} and the executors have torch {theirs}: models may not be readable on the other "
        "side, and numbers may differ; give both the same version"
    )


def join_run(
    link: DriverClient | None, gather: Callable[[str], Sequence[str]] | None, join: Message, *, in_clear: str = ""
) -> Message:
    """Send ``join`` to the driver, and return the table of ranks, with which the driver answers.

    If the driver answers "gather" instead, or ``link`` is None, the tasks send each other their joins by ``gather``,
    and each makes the table itself.

    Raises:
        Stopped: the run ended before it began.
        LinkClosed: the driver ended while this task waited, the other tasks did not start in ``WAIT_S``, or ``gather``
            is needed and is None.
        PlanError: as ``peers``, if this task makes the table.
    """
    if link is not None:
        link.send(join)
        reply = _reply(link)
        if reply["type"] == "peers":
            return reply
    if gather is None:
        raise LinkClosed(
            "the driver cannot be reached from this host, and there is no other way to find the other ranks"
        )
    return peers([json.loads(text) for text in gather(json.dumps(join))], in_clear)


def _reply(link: DriverClient) -> Message:
    deadline = time.monotonic() + WAIT_S
    while (left := deadline - time.monotonic()) > 0:
        message: Any = link.receive(min(left, 10.0))
        if message is None:
            continue
        if message["type"] in ("peers", "gather"):
            return dict(message)
        if message["type"] == "stop":
            raise Stopped
    raise LinkClosed(f"the other ranks of this run did not start within {WAIT_S:.0f} s")
