"""``advise_level``: names the ``zero_lvl`` with which a rank that ran out of memory would need less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lagom.available_memory import format_bytes
from lagom.extensions.zero.memory_plan.levels import levels_of
from lagom.extensions.zero.memory_plan.optimizer_state_bytes import step_meta_copy

if TYPE_CHECKING:
    from lagom.extensions.zero.memory_plan.needs import Level
    from lagom.on_rank.oom_report import Shortage
    from lagom.session.session import Session


def advise_level(session: Session, shortage: Shortage) -> str:
    """Return the level above the run's that would fit, or else the one that needs least; "" without one."""
    ranks = session.world_size
    levels = _possible_levels(shortage, max(ranks, 2))
    able = [one for one in levels if one.possible and one.zero_lvl > session.config.zero_lvl]
    fitting = [one for one in able if one.held + shortage.others + shortage.wanted <= shortage.limit]
    if fitting and ranks > 1:
        return f"zero_lvl={fitting[0].zero_lvl} would fit: {_describe(fitting[0])}"
    if fitting:
        level = fitting[0]
        return f"world_size=2 with zero_lvl={level.zero_lvl} would fit, on other memory: {_describe(level)}"
    if able and ranks > 1:
        return f"zero_lvl={able[-1].zero_lvl} would need less, which may not be enough: {_describe(able[-1])}"
    return ""


def _possible_levels(shortage: Shortage, num_ranks: int) -> list[Level]:
    """Return, for each ``zero_lvl``, the bytes that each of ``num_ranks`` ranks would hold; [] without an optimizer."""
    optimizers = shortage.optimizers
    if not optimizers:
        return []
    stepped = [step_meta_copy(one, [p for group in one.param_groups for p in group["params"]]) for one in optimizers]
    return levels_of(stepped, shortage.parameters, num_ranks)


def _describe(level: Level) -> str:
    return (
        f"{format_bytes(level.parameters)} of parameters, {format_bytes(level.gradients)} of gradients and "
        f"{format_bytes(level.state)} of state on each rank"
    )
