"""``RowShardedTensor``: a whole tensor of which each rank has its rows, until something looks at the others'.

See Note [Row-sharded tensors].
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lagom.errors import LagomError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.autograd.graph import Node

    from lagom.row_split.whole_batch import RowBlock, RowExchange

NOT_BY_ROWS: Any = object()
"""Result of a function by rows that cannot be computed by rows for these arguments."""


class RowShardedTensor(torch.Tensor):
    """A tensor that is whole for the program, and of which this rank has computed its rows.

    The other ranks' rows are gathered, by all ranks together, when an operation needs them.
    """

    rows: Tensor
    """This rank's rows, without a graph."""
    exchange: RowExchange
    factor: int
    """Number of rows per row of the exchange's batch."""
    signed: bytes
    """Bytes that are equal on all ranks if their inputs were."""
    is_gradient: bool
    """Rows are those of a gradient, and so the number of ranks times too large; see Note [Whole]."""
    _thread: int
    _whole: Tensor | None
    _view: tuple[RowShardedTensor, Callable[[Tensor], Tensor]] | None
    """A tensor that this is a view of, and the function that makes the view."""
    _made_by: tuple[Node | None, bool]
    """The node of its graph that made the view, and whether it needs a gradient."""

    @staticmethod
    def __new__(
        cls,
        rows: Tensor,
        exchange: RowExchange,
        factor: int,
        signed: bytes = b"",
        *,
        is_gradient: bool = False,
        stride: tuple[int, ...] | None = None,
    ) -> RowShardedTensor:
        """Return a tensor of ``factor`` rows for each row of the batch of ``exchange``."""
        shape = (factor * exchange.block.num_all, *rows.shape[1:])
        made: RowShardedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, stride, dtype=rows.dtype, device=rows.device
        )
        made.rows, made.exchange, made.factor, made.signed = rows, exchange, factor, signed
        made.is_gradient, made._whole, made._view = is_gradient, None, None
        made._thread = threading.get_ident()
        exchange.gatherer.postpone(made)
        return made

    @property
    def is_pending(self) -> bool:
        """Return whether only this rank's rows are here."""
        return self._whole is None and (self._view is None or self._view[0].is_pending)

    def has_rows_of(self, block: RowBlock, factor: int) -> bool:
        """Return whether ``rows`` are what ``block`` cuts from a tensor with ``factor`` times the rows of its batch."""
        if not self.is_pending:
            return False
        mine = self.exchange.block
        return (mine == block and self.factor == factor) or (
            mine.world_size == block.world_size
            and self.factor * mine.num_all == factor * block.num_all
            and all(self.factor * a.start == factor * b.start for a, b in zip(mine.others, block.others, strict=True))
        )

    def local_rows(self) -> Tensor:
        """Return this rank's rows of a pending tensor, without a graph."""
        return self.rows / self.exchange.block.world_size if self.is_gradient else self.rows.detach()

    def record_view(self, base: RowShardedTensor, view: Callable[[Tensor], Tensor]) -> None:
        """Record that this is ``view(base)``, which shares its memory."""
        self._view, self._made_by = (base, view), (self.grad_fn, self.requires_grad)

    def _leave_base(self) -> None:
        """Become a tensor with a gradient of its own, and no view."""
        if self._view is not None:
            self._whole, self._view = (None if self.is_pending else self.gather_rows()), None

    def plain(self) -> Tensor:
        """Return an ordinary tensor with the same memory and graph; a collective if other ranks' rows are missing."""
        if self._view is not None and (self.grad_fn, self.requires_grad) != self._made_by:
            self._leave_base()  # it has been returned by a function of autograd since
        if self._view is not None:
            base, view = self._view
            return view(base.plain())
        with torch._C.DisableTorchFunctionSubclass():
            found: Tensor = torch.ops.aten.alias(self)
        return found

    def gather_rows(self) -> Tensor:
        """Return all rows, without a graph; a collective the first time."""
        if self._view is not None:
            base, view = self._view
            return view(base.gather_rows())
        if self._whole is None:
            self.exchange.gatherer.check_place()
            if self._thread != threading.get_ident() and self.device.type == "cpu":  # GPUs have threads for backwards
                raise LagomError(_OTHER_THREAD)
            self.exchange.on_late_gather()
            with torch.no_grad():
                (whole,) = self.exchange.gather([self.rows], [self.factor], self.signed)
                self._whole = whole.div_(self.exchange.block.world_size) if self.is_gradient else whole
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` by rows if that is known to be right, else with ordinary tensors."""
        from lagom.row_split.row_wise import call_by_rows

        kwargs = kwargs or {}
        if func in _ABOUT_GRAPHS and isinstance(args[0], RowShardedTensor):
            args[0]._leave_base()
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_TENSORS_THEMSELVES:
                return func(*args, **kwargs)
            if getattr(func, "__name__", None) in _REFUSED or func == _SET_DATA:
                raise LagomError(
                    "the memory of a model's output is replaced, which lagom does not support with batches='whole'; "
                    "change a clone() of the output, or use batches='split'"
                )
            found = call_by_rows(func, args, kwargs)
            if found is not NOT_BY_ROWS:
                return found
            return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operation ``func`` with all rows; autograd has recorded it before."""
        return func(*tree_map(_gathered, args), **tree_map(_gathered, kwargs or {}))


_OTHER_THREAD = (
    "a thread looks at a model's output of which each rank has its rows only; look at it in the thread that called the "
    "model (output.sum() is enough), or use batches='split'"
)


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, RowShardedTensor) else value


def _gathered(value: Any) -> Any:
    return value.gather_rows() if isinstance(value, RowShardedTensor) else value


def _accessors(*names: str) -> list[Any]:
    """Return what torch gives ``__torch_function__`` where the attributes ``names`` are read."""
    return [getattr(torch.Tensor, name).__get__ for name in names]


_ABOUT_GRAPHS = frozenset(
    (
        *(torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.requires_grad_),
        torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    )
)
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REFUSED = ("set_", "resize_", "resize_as_")
_OF_TENSORS_THEMSELVES = frozenset(
    (
        *_ABOUT_GRAPHS,
        *_accessors("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "is_cpu", "is_cuda", "is_mps"),
        *_accessors("is_sparse", "is_sparse_csr", "is_nested", "is_quantized", "is_meta", "is_mkldnn", "is_xla"),
        *_accessors("requires_grad", "is_leaf", "grad_fn", "grad", "output_nr", "retains_grad", "_base"),
        *_accessors("_backward_hooks"),
        torch.Tensor.grad.__set__,  # type: ignore[union-attr]
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.element_size),
        *(torch.Tensor.ndimension, torch.Tensor.__len__, torch.Tensor.__hash__, torch.Tensor.get_device),
        *(torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.Tensor.is_complex),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor),
        *(torch.Tensor.backward, torch.autograd.grad, torch.autograd.backward),
    )
)
"""Functions that look at no number: at the shape or the graph of a tensor."""


# Note [Row-sharded tensors]
#
# A sliced forward gives each rank its rows of an output. To gather all rows at once costs a message as large as the
# output, and then every rank computes what follows for all rows: the loss of a language model takes longer than its
# forward. So a large output is a `RowShardedTensor`. torch's losses, and functions that compute each row by itself, are
# called on this rank's rows (`row_wise.py`); sums travel instead of outputs. Anything else sees the whole tensor.
#
# For autograd it is an ordinary output of `GatherFunction`, also when its rows are gathered later: autograd records
# operations above `__torch_dispatch__`, which supplies the numbers. So hooks, retained gradients, changes in place,
# views and functions in C++ work as with any tensor. `__torch_function__` comes first, and passes an alias, since
# functions such as numpy() look at memory, of which this tensor has none.
#
# A function by rows takes the rows by `SliceFunction`, whose gradient is row-sharded, too: nothing travels unless
# something looks at it. A view by rows knows its base, and is made anew of it once the base is whole, so that changes
# in place are seen by both.
#
# All ranks gather together, so all must look at a tensor in the same order. They do, as they run the same program on
# the same numbers; what lagom does on one rank alone must look at tensors before.
