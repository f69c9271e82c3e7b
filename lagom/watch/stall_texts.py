"""Texts about ranks that make no progress: ``stall_text`` while the run goes on, ``stall_report`` when it fails.

A rank counts its progress and tells it in ``on_rank/heartbeat.py`` (whether it waits or is stuck:
``on_rank/stack_dump.py``); its host process decides in ``host/stall_detector.py`` that it has stalled;
``driver/run_display.py`` keeps the messages of all ranks and shows the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lagom.wire.messages import Doing, RankReport, Stalled


def stall_text(stalled: Mapping[int, Stalled], world_size: int) -> str:
    """Return the report about stalled ranks: which, for how long, where they are and which ranks wait for which."""
    stuck = {rank: one for rank, one in sorted(stalled.items()) if not one.work.waits}
    waiting = [rank for rank in sorted(stalled) if rank not in stuck]
    seconds = max(one.quiet_s for one in stalled.values())
    parts = []
    places = _group_ranks({rank: stalled[rank] for rank in waiting}, lambda one: exchange_text(one.work))
    where = f" in {next(iter(places))}" if len(places) == 1 and "" not in places else ""
    if stuck:
        they = f"; {rank_names(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it{where}" if waiting else ""
        parts.append(f"{rank_names(list(stuck))} made no progress for {seconds:.0f} s{they}")
    else:
        missing = {rank for one in stalled.values() for rank in one.work.missing}
        others = sorted(missing - set(waiting)) or [rank for rank in range(world_size) if rank not in stalled]
        they = f"; {rank_names(others)} did not come" if others else ", every one for others"
        parts.append(f"{rank_names(waiting)} waited for other ranks for {seconds:.0f} s{where}{they}")
    if not where:
        parts += [f"{rank_names(ranks)} in {place}" for place, ranks in places.items() if place]
    shown = stuck or {rank: stalled[rank] for rank in waiting}
    lines = _group_ranks(stalled, lambda one: one.work.line)
    parts += [f"{rank_names(ranks)} at {line}" for line, ranks in lines.items() if line]
    parts += [f"rank {rank}: {one.work.state}" for rank, one in shown.items() if one.work.state]
    rank, one = next(iter(shown.items()))
    parts.append(f"the stack of rank {rank}:\n{stack_text(one.work)}".rstrip())
    return "\n".join(parts)


def stall_report(stalled: Stalled) -> RankReport:
    """Return the failure, a StallError, of a rank without progress for too long.

    The failure is a consequence if the rank only waited for other ranks.
    """
    rank, work = stalled.rank, stalled.work
    what = "waited for other ranks" if work.waits else "made no progress"
    state = f"; {work.state}" if work.state else ""
    at = f", at {work.line}" if work.line else ""
    if place := exchange_text(work):
        missing = work.missing
        come = "have" if len(missing) > 1 else "has"
        at = f" in {place}" + (f", to which {rank_names(missing)} {come} not come" if missing else "") + at
    return RankReport(
        rank=rank,
        ok=False,
        consequence=work.waits,
        error="StallError",
        message=f"rank {rank} {what} for {stalled.quiet_s:.0f} s{at}{state}",
        traceback=stack_text(work),
    )


def stack_text(work: Doing) -> str:
    """Return the stacks of a rank and of the processes that it has started, as text."""
    return (work.stack or "(it did not say)\n") + work.children


def exchange_text(work: Doing) -> str:
    """Return the exchange in which a rank waits, as "exchange 47 of 1200 bytes (gradients)"; "" if it is in none."""
    name, _, rest = work.exchange.partition(" ")
    if not name:
        return ""
    purpose = f" ({work.purpose})" if work.purpose else ""
    return f"{name} {work.number}{' ' * bool(rest)}{rest}{purpose}"


def _group_ranks(stalled: Mapping[int, Stalled], what: Callable[[Stalled], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, one in sorted(stalled.items()):
        found.setdefault(what(one), []).append(rank)
    return found


def rank_names(ranks: Sequence[int]) -> str:
    """Return "rank 0", "ranks 0-3" or "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
