"""``GradientStore`` and ``ParameterStore``: where gradients and the values of parameters are; by default whole."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

_NOTHING = nullcontext()


class GradientStore:
    """Whole gradients in ``Tensor.grad``; an extension that keeps them in another way has a subclass."""

    is_external = False
    """Whether an extension averages gradients by itself, so that the trunk leaves backwards and steps alone."""
    keeps_shards = False
    """Whether ranks keep only shards of averaged gradients; else a cached backward skips the store's methods."""
    always_averages = False
    """Whether gradients are averaged even where all ranks are known to compute the same."""

    def num_bytes(self) -> int:
        """Return the bytes of gradients that this rank keeps elsewhere than in ``Tensor.grad``."""
        return 0

    def has_gradient(self, parameter: Tensor) -> bool:
        """Return whether the parameter has a gradient, wherever it is."""
        return parameter.grad is not None

    def check_all(
        self, parameters: Sequence[Tensor], check: Callable[[Iterable[Tensor | None]], bool], place: str
    ) -> bool:
        """Return whether ``check`` holds for the gradients of ``parameters``; a collective if ranks have shards.

        Args:
            place: the place of the program, which must be the same on all ranks.
        """
        return check(parameter.grad for parameter in parameters)

    def prepare_backward(self, leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Return the context of a backward that will reach ``leaves``, in which lagom itself handles gradients."""
        return _NOTHING

    def end_backward(self, leaves: Iterable[Tensor]) -> None:
        """Take over the averaged gradients of ``leaves``, which had none before the backward."""


class ParameterStore:
    """Whole parameters; an extension that keeps their values elsewhere has a subclass."""

    keeps_shards = False
    """Whether this rank may keep only a shard of a parameter."""

    def is_sharded(self, parameter: Tensor) -> bool:
        """Return whether this rank keeps only a shard of the parameter."""
        return False

    def num_bytes(self) -> int:
        """Return the bytes of values that this rank keeps elsewhere than in the parameters."""
        return 0
