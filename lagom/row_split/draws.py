"""Random numbers in a sliced forward: drawn for the whole batch, of which a rank keeps its block."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lagom.errors import LagomError
from lagom.row_split.skipped_draws import draw_own_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch._ops import OpOverload

    from lagom.row_split.whole_batch import RowBlock

DrawKind = tuple[str, int]
"""Name of an operation that draws, and the number of dimensions of its result."""


class UnsupportedDrawError(Exception):
    """An operation whose random numbers cannot be drawn for the whole batch."""


class OperationMode(TorchDispatchMode):
    """Sees the operations that torch runs, one by one also where inference mode hands them over as one."""

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_composite(function) and not any(isinstance(one, torch.Tensor) and one.is_nested for one in args):
            with self:
                # Not by decompose(), which may take another way, with other random numbers.
                return function._op_dk(_COMPOSITE, *args, **(kwargs or {}))
        return self.run(function, args, kwargs or {})

    def run(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation that is not composed of others."""
        raise NotImplementedError


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


@functools.cache
def _is_composite(function: OpOverload) -> bool:
    """Return whether ``function`` is composed of others, other than for nested tensors."""

    def has_kernel(key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key))

    if not torch._C._dispatch_has_kernel(function.name()):
        return False  # such as sym_size, which the dispatcher does not know
    return has_kernel("CompositeImplicitAutograd") and not (has_kernel("CPU") or has_kernel("CUDA"))


class Draws(OperationMode):
    """Has each rank draw the numbers of one process and keep its own rows, so that all generators stay equal.

    Args:
        axes: by kind of draw, the dimension that counts the rows of the batch (or a multiple); None: none does.
        remedy: advice at the end of an error.
    """

    def __init__(
        self,
        block: RowBlock,
        axes: Mapping[DrawKind, int | None],
        remedy: str = "use batches='split' and evaluation='replicated' for this program",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._remedy = remedy
        self.block = block
        self.axes = axes

    def run(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; have it draw for the whole batch."""
        if not draws_random_numbers(function, args, kwargs):
            return function(*args, **kwargs)
        try:
            return draw_block(function, args, kwargs, self.block, self.axis)
        except UnsupportedDrawError as error:
            raise LagomError(
                f"a forward that is sliced {error}, which it did not at its first call; {self._remedy}"
            ) from None

    def axis(self, function: OpOverload, shape: tuple[int, ...]) -> int | None:
        """Return the dimension of ``shape`` that counts rows of the batch."""
        kind = (str(function), len(shape))
        if kind in self.axes:
            return self.axes[kind]
        # This kind was not drawn in the probe: usually by a layer that is skipped at random.
        rows = [d for d, size in enumerate(shape) if size == self.block.num_mine]
        return rows[0] if rows else None


def draws_random_numbers(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``function`` draws random numbers; attention does if it has dropout."""
    may_draw, index, default = _drawing(function)
    if not may_draw or index is None:
        return may_draw
    return bool(args[index] if index < len(args) else kwargs.get("dropout_p", default))


@functools.cache  # asked for each operation of a forward
def _drawing(function: OpOverload) -> tuple[bool, int | None, Any]:
    """Return whether ``function`` may draw random numbers; and position and default of its ``dropout_p``, if any."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False, None, None
    for index, argument in enumerate(function._schema.arguments):
        if argument.name == "dropout_p":
            return True, index, argument.default_value
    return True, None, None


def draw_shape(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the random numbers of ``function``.

    Raises:
        UnsupportedDrawError: when the draw depends on the numbers of its input.
    """
    index = _size_argument(function)
    if index is not None:
        return tuple(args[index])
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    name = function.overloadpacket.__name__
    if len(tensors) == 1 and tensors[0] is args[0] and (name in _LIKE or (name in _IN_PLACE and name[-1] == "_")):
        return tuple(args[0].shape)
    raise UnsupportedDrawError(f"draws numbers that depend on its input ({function})")


def draw_block(
    function: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    block: RowBlock,
    find_axis: Callable[[OpOverload, tuple[int, ...]], int | None],
) -> Any:
    """Run ``function`` for the whole batch, and return this block's part of its draw."""
    shape = draw_shape(function, args, kwargs)
    axis = find_axis(function, shape)
    if axis is None or shape[axis] % block.num_mine:
        return function(*args, **kwargs)
    factor = shape[axis] // block.num_mine
    whole = (*shape[:axis], factor * block.num_all, *shape[axis + 1 :])
    at = (axis, factor * block.start, shape[axis])
    index = _size_argument(function)
    if index is not None:
        return function(*args[:index], list(whole), *args[index + 1 :], **kwargs).narrow(*at).clone()
    if draw_own_rows(function, args, kwargs, axis, factor * block.start, whole[axis]):
        return args[0]
    like = _empty_longer(whole, args[0], axis)
    name = function.overloadpacket.__name__
    if name == "native_dropout":
        mask = function(like.fill_(1), *args[1:], **kwargs)[1].narrow(*at)
        keep = 1.0 - args[1]
        return args[0] * mask * (1.0 / keep if keep else 0.0), mask.clone()
    if name in _LIKE:
        return function(like, *args[1:], **kwargs).narrow(*at).clone()
    function(like, *args[1:], **kwargs)
    return args[0].copy_(like.narrow(*at))


_IN_PLACE = {
    *("bernoulli_", "uniform_", "normal_", "exponential_", "random_"),
    *("log_normal_", "cauchy_", "geometric_"),
}
_LIKE = {"rand_like", "randn_like", "randint_like", "native_dropout"}


def _size_argument(function: OpOverload) -> int | None:
    for index, argument in enumerate(function._schema.arguments):
        if argument.name == "size":
            return index
    return None


def _empty_longer(shape: tuple[int, ...], like: Tensor, axis: int) -> Tensor:
    """Return an empty tensor like ``like``, longer along ``axis``, with its dimensions in the same memory order."""
    if not like.numel():
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    order = sorted(range(like.dim()), key=lambda d: (like.stride(d), like.shape[d]), reverse=True)
    return torch.empty([shape[d] for d in order], dtype=like.dtype, device=like.device).permute(
        [order.index(d) for d in range(like.dim())]
    )
