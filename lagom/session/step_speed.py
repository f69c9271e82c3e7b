"""``step_speed``: the ``Speed`` of the steps that a session has timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lagom.speed import Speed, StepPart
from lagom.speed_advice import Facts, advice
from lagom.watch import step_clock as kinds

if TYPE_CHECKING:
    from lagom.session.session import Session

_SECONDS = {
    "loading": (kinds.LOADING, kinds.LOADING_DIVIDED, kinds.LOADING_SHARED),
    "forward": (kinds.FORWARD, kinds.FORWARD_DIVIDED),
    "backward": (kinds.BACKWARD, kinds.BACKWARD_DIVIDED),
    "exchange": (kinds.EXCHANGE,),
    "optimizer": (kinds.OPTIMIZER, kinds.OPTIMIZER_DIVIDED),
    "own": (kinds.OWN,),
}
"""For each part of a step, where its repeated, its divided and its shared seconds are."""


def step_speed(session: Session) -> Speed:
    """Return the speed of the steps so far, which have then ended."""
    session.clock.end()
    steps, seconds = session.clock.mean()
    if not steps:  # as in a program that exchanges by itself, where patches do nothing
        return Speed(world_size=session.world_size)
    parts = {name: [seconds[kind] for kind in places] for name, places in _SECONDS.items()}
    if session.world_size == 1:  # backwards are not patched, so they are among the program's own time
        parts["own"] = [sum(parts["own"]) + sum(parts.pop("forward")) + sum(parts.pop("backward"))]
    elif session.device.type != "cpu" and (forward := sum(parts["forward"])):
        # Autograd runs in a thread of the device, where no time is read: take the shares of the forward.
        backward = sum(parts["backward"])
        parts["backward"] = [backward * one / forward for one in parts["forward"]]
    found = tuple(_part(name, values) for name, values in parts.items() if sum(values))
    facts = Facts(
        world_size=session.world_size,
        num_workers=session.progress.num_workers,
        loading_reason=session.progress.loading_reason,
        sees_whole=session.config.batches == "whole",
        whole=session.forwards.whole_calls.modules(),
    )
    return Speed(
        world_size=session.world_size,
        threads=torch.get_num_threads(),
        steps=steps,
        parts=found,
        advice=advice(found, facts),
    )


def _part(name: str, values: list[float]) -> StepPart:
    repeated, divided, shared = (*values, 0.0, 0.0)[:3]
    total = repeated + divided + shared
    return StepPart(name=name, seconds=total, divided=divided / total, shared=shared / total)
