"""Which requests of the ranks belong together, and whether they fit: arithmetic of values, equal on all ranks.

See Note [Names] in negotiation.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

REDUCES = ("average", "sum", "adasum", "min", "max", "product")
_GATHERS = ("allgather", "alltoall")
_ONLY_ALL = ("allgather", "alltoall", "broadcast", "reducescatter")
"""What a rank that has joined has no part in."""
FUSED_BYTES = 1 << 26
"""That travel at once at most, where one tensor alone is not larger."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a rank asks for by a name."""

    name: str
    kind: str
    """"allreduce", "allgather", "broadcast", "alltoall", "reducescatter" or "barrier"."""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    itemsize: int = 0
    device: str = "cpu"
    op: str = ""
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of the tensor."""
        return self.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank tells the others in a round."""

    requests: tuple[Request, ...]
    joined: bool = False
    stuck_s: float = -1.0
    """For which the program has been waiting without anything new; negative when it does not wait."""

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps([[astuple(one) for one in self.requests], self.joined, self.stuck_s]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Told:
        """What ``encode`` gave."""
        requests, joined, stuck_s = json.loads(data)
        made = []
        for one in requests:
            fields: Any = [tuple(part) if isinstance(part, list) else part for part in one]
            made.append(Request(*fields))
        return cls(tuple(made), joined, stuck_s)


@dataclass(frozen=True, slots=True)
class Match:
    """A name that every rank has asked for, but some that have joined."""

    requests: tuple[Request | None, ...]
    """By rank; None where it has joined without asking."""
    complaint: str
    """Why it cannot be done; "" when it can."""

    @property
    def first(self) -> Request:
        """Any of them, for what they have in common."""
        return next(one for one in self.requests if one is not None)


def matched(told: Sequence[Told]) -> list[Match]:
    """What can be done now, in one order for all ranks; ``told`` is what all ranks said, in rank order."""
    by_name = [{one.name: one for one in each.requests} for each in told]
    found = []
    for name in dict.fromkeys(name for names in by_name for name in names):
        # What a rank asked for before it joined is its own still.
        having = [names.get(name) for names in by_name]
        if all(one is not None or each.joined for one, each in zip(having, told, strict=True)):
            found.append(Match(tuple(having), _complaint(having)))
    return found


def batches(matches: Sequence[Match]) -> Iterator[list[Match]]:
    """``matches`` in their order, reductions that can travel together in one."""
    batch: list[Match] = []
    for match in matches:
        if batch and _fit(batch, match):
            batch.append(match)
            continue
        if batch:
            yield batch
        batch = [match]
    if batch:
        yield batch


def _fit(batch: list[Match], match: Match) -> bool:
    one, other = batch[-1].first, match.first
    alike = ("kind", "dtype", "device", "op", "prescale", "postscale")
    return (
        one.kind == "allreduce"
        and not batch[-1].complaint
        and not match.complaint
        and all(getattr(one, field) == getattr(other, field) for field in alike)
        and sum(each.first.num_bytes for each in batch) + other.num_bytes <= FUSED_BYTES
    )


def _complaint(having: Sequence[Request | None]) -> str:
    given = [(rank, one) for rank, one in enumerate(having) if one is not None]
    first_rank, first = given[0]
    for rank, one in given[1:]:
        for what, mine, theirs in _compared(first, one):
            if mine != theirs:
                return (
                    f"ranks asked for {first.name!r} with different {what}: "
                    f"rank {first_rank} with {mine}, rank {rank} with {theirs}"
                )
    if len(given) < len(having) and first.kind in _ONLY_ALL:
        return f"{first.kind} of {first.name!r} is not to be had once a rank has called join()"
    if first.kind in (*_GATHERS, "reducescatter") and not first.shape:
        return f"{first.kind} of {first.name!r}, which has no dimension; give it one with tensor.unsqueeze(0)"
    return _bad_splits(given, len(having)) if first.kind == "alltoall" else ""


def _compared(one: Request, other: Request) -> Iterator[tuple[str, object, object]]:
    yield "operations", one.kind, other.kind
    yield "data types", one.dtype, other.dtype
    yield "devices", one.device, other.device
    if one.kind in _GATHERS:
        yield "shapes (only the first dimension may differ)", _rest(one), _rest(other)
    else:
        yield "shapes", list(one.shape), list(other.shape)
    yield "reductions", one.op, other.op
    yield "factors", (one.prescale, one.postscale), (other.prescale, other.postscale)
    yield "root ranks", one.root, other.root


def _rest(request: Request) -> list[object]:
    return ["any", *request.shape[1:]] if request.shape else []


def _bad_splits(given: Sequence[tuple[int, Request]], size: int) -> str:
    for rank, one in given:
        if not one.splits and one.shape[0] % size:
            return (
                f"alltoall of {one.name!r}: rank {rank} has {one.shape[0]} rows, which {size} ranks do not divide; "
                "say with splits= how many go to each"
            )
        if one.splits and (len(one.splits) != size or min(one.splits) < 0 or sum(one.splits) != one.shape[0]):
            return (
                f"alltoall of {one.name!r}: rank {rank} has splits {list(one.splits)} for {one.shape[0]} rows and "
                f"{size} ranks; want one number for each rank, with the rows as their sum"
            )
    return ""
