"""``timed_steps``: counts the time of optimizer steps as a part of the training step."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as optimizers

from lagom.watch.step_clock import OPTIMIZER, OWN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.watch.step_clock import StepClock


@contextmanager
def timed_steps(clock: StepClock) -> Iterator[None]:
    """Switch ``clock`` around the step of every optimizer, by torch's global hooks, which leave optimizers as they are.

    The time of a step that fails ends with the next change of part.
    """
    before: dict[int, int] = {}

    def begin(optimizer: Any, *_: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            before[id(optimizer)] = clock.switch(OPTIMIZER)

    def end(optimizer: Any, *_: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            clock.switch(before.pop(id(optimizer), OWN))

    handles = [
        optimizers.register_optimizer_step_pre_hook(begin),
        optimizers.register_optimizer_step_post_hook(end),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
