"""Rendezvous of a run's tasks: each sends its facts, and all get the same table back."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import time
from collections.abc import Callable, Sequence

from lagom.errors import PlanError
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.messages import Gather, Join, Peers, RankAddress, Stop, from_json, to_json

WAIT_S = 600.0
"""Longest time in seconds that a task waits for the other tasks to start."""
LEAVE_S = 1.0
"""Seconds in which other ranks can end after one has called ``sys.exit`` or pruned its trial: rank 0 may be writing."""
WRITE_S = 1.0
"""Seconds in which rank 0 can raise as well and finish its writes, after another rank has raised, on busy cores too."""

REPEATED_S = 1.0
"""Seconds after a SIGTERM in which another one is the same notice: some signal a process, and then its group."""


class Stopped(Exception):
    """Raised in a host process when the driver has ended the run before all tasks had joined."""


def peers(joins: Sequence[Join], in_clear: str = "") -> Peers:
    """Build the table of all ranks from the tasks' joins.

    Args:
        in_clear: name of a library that would send unencrypted between hosts, which is not allowed in this run: ranks
            on several hosts are then an error. "" if there is none.

    Raises:
        PlanError: if tasks differ in the version of Python or torch, or ranks of several hosts would use ``in_clear``.
    """
    ordered = sorted(joins, key=lambda join: join.task)
    for fact in ("python", "torch"):
        versions = {str(getattr(join, fact)): join.host_name for join in ordered}
        if len(versions) > 1:
            listed = ", ".join(f"{version} on {host}" for version, host in versions.items())
            raise PlanError(f"the executors have different versions of {fact}: {listed}; give all of them the same")
    hosts = sorted({join.host for join in ordered})
    if in_clear and len(hosts) > 1:
        names = ", ".join(host.split("|")[0] for host in hosts[:4])
        raise PlanError(
            f"Spark encrypts what it sends, and the ranks are on {len(hosts)} hosts ({names}), between which "
            f"{in_clear} would send gradients and data in clear. Have all ranks on one host; or, where that network "
            "may carry it (it is private, or encrypted itself), set allow_unencrypted_collectives=True"
        )
    ranks = [
        RankAddress(rank, join.host, join.ip, gpu)
        for join in ordered
        for rank, gpu in zip(join.ranks, join.gpus or itertools.repeat(None, len(join.ranks)), strict=True)
    ]
    shared = len({(rank.host, rank.gpu) for rank in ranks}) < len(ranks)
    # A task with another address is in another network namespace, even if it sees the same files.
    near = len({(rank.host, rank.ip) for rank in ranks}) == 1
    return Peers(store=None if near else ordered[0].store, ranks=ranks, nccl=not shared)


def other_torch(joins: Sequence[Join]) -> str:
    """Return a line that says that this process, the driver, has another version of torch than the tasks.

    It is "" if the versions are equal up to the last number, or the driver has no torch.
    """
    try:
        own = (importlib.metadata.version("torch") or "").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""
    theirs = joins[0].torch
    if not own or own.split(".")[:2] == theirs.split(".")[:2]:
        return ""
    return (
        f"the driver has torch {own} and the executors have torch {theirs}: models may not be readable on the other "
        "side, and numbers may differ; give both the same version"
    )


def join_run(
    link: DriverClient | None, gather: Callable[[str], Sequence[str]] | None, join: Join, *, in_clear: str = ""
) -> Peers:
    """Send ``join`` to the driver, and return the table of ranks, with which the driver answers.

    If the driver answers ``Gather`` instead, or ``link`` is None, the tasks send each other their joins by ``gather``,
    and each makes the table itself.

    Raises:
        Stopped: the run ended before it began.
        LinkClosed: the driver ended while this task waited, the other tasks did not start in ``WAIT_S``, or ``gather``
            is needed and is None.
        PlanError: as ``peers``, if this task makes the table.
    """
    if link is not None:
        link.send(join)
        table = await_peers(link)
        if table is not None:
            return table
    if gather is None:
        raise LinkClosed(
            "the driver cannot be reached from this host, and there is no other way to find the other ranks"
        )
    joins = [from_json(json.loads(text)) for text in gather(json.dumps(to_json(join)))]
    return peers([other for other in joins if isinstance(other, Join)], in_clear)


def await_peers(link: DriverClient) -> Peers | None:
    """Wait for the driver's table of ranks; return None if the driver says that the tasks are to gather it."""
    deadline = time.monotonic() + WAIT_S
    while (left := deadline - time.monotonic()) > 0:
        match link.receive(min(left, 10.0)):
            case Peers() as table:
                return table
            case Gather():
                return None
            case Stop():
                raise Stopped
    raise LinkClosed(f"the other ranks of this run did not start within {WAIT_S:.0f} s")
