"""Matches the requests of all ranks and checks that they fit. Every rank computes the same result.

See Note [Names] in negotiation.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

REDUCTIONS = ("average", "sum", "adasum", "min", "max", "product")
_GATHERS = ("allgather", "alltoall")
_NEED_ALL_RANKS = ("allgather", "alltoall", "broadcast", "reducescatter")
"""Exchanges that are impossible once a rank has joined."""
_MAX_BATCH_BYTES = 1 << 26
"""Largest batch of reductions; a single larger tensor travels alone."""


@dataclass(frozen=True, slots=True)
class Request:
    """An exchange that a rank asks for by name."""

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
        """Size of the tensor."""
        return self.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class RankMessage:
    """The message of one rank in a round."""

    requests: tuple[Request, ...]
    has_joined: bool = False
    stuck_s: float = -1.0
    """Seconds for which the program has waited without news; negative when it does not wait."""

    def encode(self) -> bytes:
        """Return the message as JSON."""
        return json.dumps([[astuple(one) for one in self.requests], self.has_joined, self.stuck_s]).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankMessage:
        """Read the result of ``encode``."""
        encoded, has_joined, stuck_s = json.loads(data)
        requests = []
        for values in encoded:
            fields: Any = [tuple(value) if isinstance(value, list) else value for value in values]
            requests.append(Request(*fields))
        return cls(tuple(requests), has_joined, stuck_s)


@dataclass(frozen=True, slots=True)
class Match:
    """An exchange that every rank has asked for, except ranks that have joined."""

    requests: tuple[Request | None, ...]
    """One for each rank; None where a rank has joined without asking."""
    problem: str
    """The reason if the requests do not fit; "" if they fit."""
    is_wrong_argument: bool = False
    """Whether the reason is one rank's request by itself: a ``ValueError``, as in Horovod."""

    @property
    def first(self) -> Request:
        """The first request, for the fields that all have in common."""
        return next(one for one in self.requests if one is not None)


def match(messages: Sequence[RankMessage]) -> list[Match]:
    """Return the exchanges that can be done now, in an order that is the same on all ranks."""
    by_name = [{one.name: one for one in message.requests} for message in messages]
    matches = []
    for name in dict.fromkeys(name for names in by_name for name in names):
        # A rank that has joined still takes part in exchanges that it asked for before.
        requests = tuple(names.get(name) for names in by_name)
        if all(one or message.has_joined for one, message in zip(requests, messages, strict=True)):
            matches.append(_checked(requests))
    return matches


def split_into_batches(matches: Sequence[Match]) -> Iterator[list[Match]]:
    """Keep the order of ``matches``; put neighbouring reductions that can travel together into one batch."""
    batch: list[Match] = []
    for each in matches:
        if batch and not _fits(batch, each):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


def describe_deadlock(messages: Sequence[RankMessage], members: Sequence[int]) -> str:
    """Say that all ranks wait for each other, and for which names."""
    parts = []
    for member, message in zip(members, messages, strict=True):
        names = [repr(one.name) for one in message.requests[:3]] + ["..."] * (len(message.requests) > 3)
        parts.append(f"rank {member} " + ("has joined" if message.has_joined else f"waits for {', '.join(names)}"))
    return f"no rank can go on: {'; '.join(parts)}. All ranks must ask for the same names"


def _fits(batch: list[Match], candidate: Match) -> bool:
    one, other = batch[-1].first, candidate.first
    equal_fields = ("kind", "dtype", "device", "op", "prescale", "postscale")
    return (
        one.kind == "allreduce"
        and not batch[-1].problem
        and not candidate.problem
        and all(getattr(one, field) == getattr(other, field) for field in equal_fields)
        and sum(each.first.num_bytes for each in batch) + other.num_bytes <= _MAX_BATCH_BYTES
    )


def _checked(requests: tuple[Request | None, ...]) -> Match:
    if problem := _problem(requests):
        return Match(requests, problem)
    present = [(rank, one) for rank, one in enumerate(requests) if one is not None]
    problem = _problem_of_splits(present, len(requests)) if present[0][1].kind == "alltoall" else ""
    return Match(requests, problem, is_wrong_argument=bool(problem))


def _problem(requests: Sequence[Request | None]) -> str:
    present = [(rank, one) for rank, one in enumerate(requests) if one is not None]
    first_rank, first = present[0]
    for rank, one in present[1:]:
        for subject, wanted, found in _compare(first, one):
            if wanted != found:
                return (
                    f"ranks asked for {first.name!r} with different {subject}: "
                    f"rank {first_rank} with {wanted}, rank {rank} with {found}"
                )
    if len(present) < len(requests) and first.kind in _NEED_ALL_RANKS:
        return f"{first.kind} of {first.name!r} is not to be had once a rank has called join()"
    if first.kind in (*_GATHERS, "reducescatter") and not first.shape:
        return f"{first.kind} of {first.name!r}, which has no dimension; give it one with tensor.unsqueeze(0)"
    return ""


def _compare(one: Request, other: Request) -> Iterator[tuple[str, object, object]]:
    yield "operations", one.kind, other.kind
    yield "data types", one.dtype, other.dtype
    yield "devices", one.device, other.device
    if one.kind in _GATHERS:
        first, second = ([*request.shape[1:]] if request.shape else None for request in (one, other))
        yield "shapes (only the first dimension may differ)", first, second
    else:
        yield "shapes", list(one.shape), list(other.shape)
    yield "reductions", one.op, other.op
    yield "factors", (one.prescale, one.postscale), (other.prescale, other.postscale)
    yield "root ranks", one.root, other.root


def _problem_of_splits(present: Sequence[tuple[int, Request]], size: int) -> str:
    for rank, one in present:
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
