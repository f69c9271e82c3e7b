"""Random numbers in a sliced forward: each rank draws for the whole batch, and keeps the numbers of its rows."""

from __future__ import annotations

import functools
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lagom.errors import LagomError
from lagom.forward.rows.skipped_draws import draw_own_rows
from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason
from lagom.patching.dynamo import num_compilations
from lagom.patching.watched_operations import is_composite, is_watched, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

    from lagom.forward.rows.whole_batch import RowBlock

DrawKind = tuple[str, int]
"""Name of an operation that draws, and the number of dimensions of its result."""


class UnsupportedDrawError(NotByRowsError):
    """An operation whose random numbers cannot be drawn for the whole batch."""


class BranchMismatchError(Exception):
    """A forward takes another way (other branches of its code) than when it was probed."""


class OperationMode(TorchDispatchMode):
    """A dispatch mode that sees torch's operations one by one; it takes composite ones apart in inference mode too."""

    pausing_thread: ClassVar[int | None] = None
    """Thread whose operations run unchanged, since a person types them at a debugger's prompt; None for no thread."""

    def __torch_dispatch__(
        self, function: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_pausing():
            return function(*args, **(kwargs or {}))
        if _is_composite(function) and not any(isinstance(one, torch.Tensor) and one.is_nested for one in args):
            with self:
                # Not by decompose(), which may run other operations, with other random numbers.
                return function._op_dk(_COMPOSITE, *args, **(kwargs or {}))
        return self.run(function, args, kwargs or {})

    def _is_pausing(self) -> bool:
        return self.pausing_thread is not None and self.pausing_thread == threading.get_ident()

    def run(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation that is not composed of others."""
        raise NotImplementedError


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_is_composite = functools.cache(is_composite)


class Draws(OperationMode):
    """Lets each rank draw the numbers of one process and keep those of its rows, so that generators stay equal.

    Args:
        block: the rank's (or micro-batch's) rows.
        axes: for each kind of draw, the dimension with the batch's rows, or a multiple of them; None if there is none.
        reads: values and shapes that the forward read from tensors when it was probed, such as by ``.item()``. If the
            forward reads others, or draws in another way, a ``BranchMismatchError`` is raised. None: reads are not
            compared, and a draw in another way is a ``LagomError``, as it is after ``end``.
        multiples: kinds of draws that had several rows for each row of the batch when the forward was probed.
        remedy: advice at the end of an error.
    """

    def __init__(
        self,
        block: RowBlock,
        axes: Mapping[DrawKind, int | None],
        reads: Sequence[object] | None = None,
        multiples: Container[DrawKind] = (),
        remedy: str = "use batches='split' and evaluation='replicated' for this program",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._remedy = remedy
        self._reads = None if reads is None else iter(reads)
        self._answers = [one for one in reads or () if isinstance(one, Answer)]
        self._may_mismatch = reads is not None
        self.has_mismatch = False
        """Whether the forward has taken another way than in its probe."""
        self.is_stale = False
        """Whether an ``Answer`` was not to the question of the forward."""
        self._is_traced = False
        """Whether Dynamo, or another tracer, has run operations of the forward without numbers."""
        self._multiples = multiples
        self.is_paused = False
        """Whether operations run unchanged for now."""
        self.block = block
        self.axes = axes

    @contextmanager
    def entered(self, *, by_mode: bool) -> Iterator[None]:
        """Context manager in which operations draw this rank's rows, and reads are compared.

        Args:
            by_mode: handle all operations by the dispatch mode, not only those that draw or read. Without effect inside
                of another ``Draws`` that handles those only: a mode would come after it, and must come before it.
        """
        if not is_watched() and (by_mode or num_compilations()):
            with self:
                yield
            return
        with watched(self._watched):
            yield
            is_lost = not is_watched()  # torch.export leaves the key out at its end
        if is_lost or self._is_traced:
            self._refuse("compiles or exports code")

    def _watched(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        self._is_traced = self._is_traced or is_traced
        if is_traced or self._is_pausing():
            return function(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None or (
            torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in args)
        ):
            with self:  # which sees the operation below autograd, and without torch.func's wrappers
                return function(*args, **kwargs)
        return self.run(function, args, kwargs)

    def run(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; one that draws does so for the whole batch, and returns this rank's rows."""
        if self.is_paused:
            return function(*args, **kwargs)
        if not draws_random_numbers(function, args, kwargs):
            result = function(*args, **kwargs)
            return self._answer(result) if reads_numbers(function, args) else result
        try:
            return draw_block(function, args, kwargs, self.block, self.axis)
        except UnsupportedDrawError as error:
            self._refuse(str(error))

    def _answer(self, result: Any) -> Any:
        """Compare a number that was read with the probe's; return it, or in its place that of the whole batch."""
        if self._reads is None:
            if any(one.part == result != one.whole for one in self._answers):
                self._refuse("reads a number of its input once more in the backward")
            return result
        wanted = next(self._reads, None)
        if isinstance(wanted, Answer):
            self.is_stale = self.is_stale or result != wanted.part
            return wanted.whole
        if read_numbers(result) != wanted:
            self._refuse("reads other numbers")
        return result

    def axis(self, function: OpOverload, shape: tuple[int, ...]) -> int | None:
        """Return the dimension of ``shape`` that counts rows of the batch; None if none does."""
        kind, mine = (str(function), len(shape)), self.block.num_mine
        axis = self.axes.get(kind)
        # A probe that had one row for each row of the batch does not show the order of several.
        is_other = axis is not None and (shape[axis] % mine or (shape[axis] != mine and kind not in self._multiples))
        if kind not in self.axes or is_other:
            self._refuse(f"draws random numbers in a way ({function})")
        return axis

    def end(self) -> None:
        """End the comparison with the probe: a backward may repeat parts of the forward later.

        Raises:
            BranchMismatchError: when the forward has taken another way, also if its code has caught the exception.
        """
        reads, self._reads, self._may_mismatch = self._reads, None, False
        if self.has_mismatch or (reads is not None and next(reads, None) is not None):
            raise BranchMismatchError

    def _refuse(self, what: str) -> NoReturn:
        if self._may_mismatch:
            self.has_mismatch = True
            raise BranchMismatchError
        raise LagomError(f"a forward that is sliced {what}, which it did not at its first call; {self._remedy}")


class InputRead(NamedTuple):
    """Stands for a number of the input among those that a forward reads.

    See Note [Reads of the input] in input_reads.py.
    """

    place: int
    """Place among the reads of the input."""


class Answer(NamedTuple):
    """A number of the whole batch, for a forward that has only a part of it."""

    place: int
    whole: object
    part: object
    """The number of the part, which the forward should read."""


def reads_numbers(function: OpOverload, args: Sequence[Any]) -> bool:
    """Return whether ``function`` takes values out of a tensor, or returns a shape that depends on values."""
    if function._schema.name == "aten::_pack_padded_sequence":  # its shape depends on lengths, which it does not tell
        return True
    if _READS.isdisjoint(function.tags):
        return False
    if function._schema.name == "aten::index":  # by masks or by numbers
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return True


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments or results of an operation, those in lists, tuples and dicts included.

    These contain no other containers, and ``tree_flatten``, which knows all containers, takes ten times as long.
    """
    return [leaf for leaf in leaves_in(values) if isinstance(leaf, torch.Tensor)]


def leaves_in(values: Iterable[Any]) -> list[Any]:
    """Return tensors, numbers and other values among arguments or results of an operation; see ``tensors_in``."""
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple, dict)):
            leaves += leaves_in(value.values() if isinstance(value, dict) else value)
        else:
            leaves.append(value)
    return leaves


def written_tensors(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that ``function`` changes, those of ``out=`` and in lists included."""
    return tensors_in(
        [args[place] if place < len(args) else kwargs.get(name) for place, name in _written_arguments(function)]
    )


@functools.cache  # asked for each operation of a forward
def _written_arguments(function: OpOverload) -> list[tuple[int, str]]:
    """Return place and name of each argument that ``function`` changes."""
    return [
        (place, argument.name)
        for place, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def read_numbers(result: Any) -> list[object]:
    """Return the values and shapes that a program learns from ``result``, which a reading function returned."""
    return [tuple(one.shape) if isinstance(one, torch.Tensor) else one for one in tree_flatten(result)[0]]


_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


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
        UnsupportedDrawError: when the draw depends on the values of its input.
    """
    index = _size_argument(function)
    if index is not None:
        return tuple(args[index])
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    name = function.overloadpacket.__name__
    if len(tensors) == 1 and tensors[0] is args[0] and (name in _LIKE or (name in _IN_PLACE and name[-1] == "_")):
        return tuple(args[0].shape)
    raise UnsupportedDrawError(WholeReason.DRAWS_BY_INPUT, operation=function)


def draw_block(
    function: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    block: RowBlock,
    find_axis: Callable[[OpOverload, tuple[int, ...]], int | None],
) -> Any:
    """Run ``function`` for the whole batch, and return this block's part of its draw; the whole draw if it has no rows.

    Args:
        find_axis: returns the dimension with the rows, given ``function`` and the draw's shape; None without rows.

    Raises:
        UnsupportedDrawError: when the draw depends on the values of its input.
    """
    if args and hasattr(args[0], "fake_mode"):
        return function(*args, **kwargs)  # a FakeTensor has no numbers
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


@functools.cache
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
