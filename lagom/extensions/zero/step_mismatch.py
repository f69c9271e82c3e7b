"""``raise_step_mismatch``: raises the error for ranks whose optimizer steps differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from lagom.errors import DivergenceError
from lagom.exchange.plain_values import all_gather_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Optimizer

    from lagom.exchange.group import Group


class StepSignature(NamedTuple):
    """Values that describe the step that a rank was about to make, to be compared between ranks."""

    identity: bytes
    """Bytes that are equal on two ranks if they divide the same parameters into the same parts."""
    parameters: Sequence[torch.Tensor]
    sums: Mapping[int, tuple[str, int]] | None
    """Checksums of gradients, by index of the parameter; None if they were not compared."""
    settings: Sequence[Mapping[str, Any]]
    """The result of ``group_settings``."""


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return each group's comparable settings for which the optimizer has a default, such as the learning rate."""
    return [
        {name: value for name in optimizer.defaults if (value := _comparable_setting(group.get(name))) is not None}
        for group in optimizer.param_groups
    ]


def _comparable_setting(value: object) -> object:
    """Return a number or a tuple; None for values that are not compared.

    GPU tensors are not compared, since a read of one would wait for the GPU.
    """
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    return value if isinstance(value, (int, float, tuple)) else None


def raise_step_mismatch(
    group: Group, step: StepSignature | None, name: Callable[[torch.Tensor | None], str]
) -> NoReturn:
    """Find out how the ranks' steps differ, and raise; a collective.

    Args:
        step: the step that this rank was about to make; None if this rank is not at the beginning of a step.
        name: returns the name of a parameter.

    Raises:
        DivergenceError: always, with the difference.
    """
    told = None if step is None else (step.identity, step.sums, step.settings)
    rows = all_gather_values(group, told)
    if step is not None and all(row is not None and row[0] == step.identity for row in rows):
        _compare_settings([row[2] for row in rows])
        for i, p in enumerate(step.parameters) if all(row[1] is not None for row in rows) else ():
            if len({row[1].get(i) for row in rows}) > 1:
                raise DivergenceError(
                    f"{name(p)} has other gradients on other ranks when its optimizer steps; gradients are averaged in "
                    "backward() and torch.autograd.grad, so step by these, and not by torch.func.grad or this rank's "
                    "own data"
                )
    raise DivergenceError(
        "the ranks step different optimizers, or parameters that differ; create the same optimizers with the same "
        "parameters, and step them in the same order, on every rank"
    )


def _compare_settings(rows: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Check that all ranks step with the same settings, since each rank steps another part of the parameters.

    Raises:
        DivergenceError: when the settings differ.
    """
    for number, groups in enumerate(zip(*rows, strict=False)):
        for name in groups[0]:
            values = [group.get(name) for group in groups]
            if len(set(map(repr, values))) > 1:
                told = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
                raise DivergenceError(
                    f"{name!r} of an optimizer's parameter group {number} is {told}. Each rank steps a part of the "
                    "parameters (zero_lvl), so settings must be equal on all; where a number of the rank's own share "
                    "decides, as a running loss does in ReduceLROnPlateau, use batches='whole'"
                )
