"""``advice``: what would make the steps of a program faster on its ranks, in sentences about the program."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lagom.speed import StepPart
from lagom.whole_modules import WholeModule

_MOST = 2
_WORTH = 0.15
"""Share of a step that a remedy must save to be named."""
_WORTH_DIVIDING_S = 1e-3
"""Seconds from which dividing work saves more than the exchange that it needs."""
_MAX_WORKERS = 8


class Facts(NamedTuple):
    """Facts about a program beside the parts of its steps."""

    world_size: int
    num_workers: int | None = None
    """Workers of the training loader; None without a loader."""
    loading_reason: str = ""
    """Reason, with its remedy, for which every rank loads every sample of a loader without workers."""
    sees_whole: bool = True
    """Whether the program sees whole batches on every rank."""
    whole: Sequence[WholeModule] = ()
    """Modules that ran whole on every rank, the one with the largest share of forwards first."""


class Remedy(NamedTuple):
    """A sentence, and the share of a step that the remedy in it may save."""

    saves: float
    text: str
    is_cause: bool = False
    """Whether this is why ranks gain nothing, if they do not."""


def advice(parts: Sequence[StepPart], facts: Facts) -> tuple[str, ...]:
    """Return at most two sentences, the most helpful first.

    Where ranks gain nothing, one says what it would take, if there is any.
    """
    total = sum(part.seconds for part in parts)
    if not total:
        return ()
    remedies = sorted(_remedies(parts, total, facts), key=lambda one: -one.saves)
    worthy = [one for one in remedies if one.saves >= _WORTH][:_MOST]
    if facts.world_size > 1 and sum(one.in_one_process(facts.world_size) for one in parts) <= total:
        causes = [one for one in remedies if one.is_cause] or remedies[:1]
        worthy += [one for one in causes if one not in worthy]
        worthy = worthy[: _MOST - 1] + worthy[-1:] if len(worthy) > _MOST else worthy
    return tuple(one.text for one in worthy)


def _remedies(parts: Sequence[StepPart], total: float, facts: Facts) -> Iterator[Remedy]:
    parts_by_name = {part.name: part for part in parts}
    if "loading" in parts_by_name and facts.num_workers is not None:
        yield _loading(parts_by_name["loading"], parts_by_name["loading"].seconds / total, facts)
    if facts.world_size == 1:
        return
    saved = 1 - 1 / facts.world_size
    repeated = {part.name: part.seconds * (1 - part.divided - part.shared) for part in parts}
    computes = repeated.get("forward", 0.0) + repeated.get("backward", 0.0)
    if facts.whole:
        yield _modules(computes / total, saved, facts.whole[0])
    if repeated.get("optimizer", 0.0) >= _WORTH_DIVIDING_S:
        share = repeated["optimizer"] / total
        text = f"{share:.0%} of a step is the optimizer's, which every rank repeats: zero_lvl=1 divides it"
        yield Remedy(share * saved, text)
    if repeated.get("own", 0.0) >= _WORTH_DIVIDING_S and facts.sees_whole:
        share = repeated["own"] / total
        text = f"{share:.0%} of a step is the program's own code, which every rank repeats"
        remedy = "work on samples belongs in the data set, on batches in the model's forward"
        yield Remedy(share * saved, f"{text}: {remedy}")
    if "exchange" in parts_by_name:
        share = parts_by_name["exchange"].seconds / total
        text = f"{share:.0%} of a step is exchange between ranks, and waiting for them"
        yield Remedy(share / 2, f"{text}: larger batches compute more between two exchanges")


def _loading(part: StepPart, share: float, facts: Facts) -> Remedy:
    num_workers = facts.num_workers or 0
    is_repeated = facts.world_size > 1 and part.divided + part.shared < 0.5
    text = f"{share:.0%} of a step is loading{', which every rank repeats' * is_repeated}"
    wanted = math.ceil(share / max(1 - share, 1 / _MAX_WORKERS))
    wanted = min(max(wanted, 2, 2 * num_workers), max(os.cpu_count() or 2, 2), _MAX_WORKERS)
    if is_repeated and not num_workers and facts.loading_reason:
        remedy = f", since {facts.loading_reason}"
    elif is_repeated and num_workers:
        remedy = f" with {_workers(num_workers)} of its own: share_loading=True lets one set serve all"
    elif wanted <= num_workers:
        remedy = f" with {_workers(num_workers)}: prepare the samples before the run, or add cores"
    else:
        remedy = f": give the loader num_workers={wanted}"
    return Remedy(share, text + remedy)


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}"


def _modules(share: float, saved: float, module: WholeModule) -> Remedy:
    """Return the remedy for the ``module`` that ran whole for most of the time; ``share`` is all repeated computing."""
    if module.is_small:
        rows = module.pays_from
        more = f"batches of {rows:,} rows would be divided" if rows else "only a larger one would be divided"
        text = f"{module.name} is small, so every rank computes all of it: {more}"
        return Remedy(share * saved, text, is_cause=True)
    parts = " (modules inside it are divided)" if module.splits_inside else ""
    text = f"{share:.0%} of a step is forward and backward that every rank repeats: {module.name}{parts} {module.text}"
    return Remedy(share * saved, f"{text}; {module.remedy}" if module.remedy else text)
