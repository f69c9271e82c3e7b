"""``call_by_rows``: call functions of row-sharded tensors on this rank's rows: losses, views, and functions of rows."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lagom.row_split.row_functions import gather_blocks, row_sharded_view, slice_rows
from lagom.row_split.row_sharded_tensor import NOT_BY_ROWS, RowShardedTensor
from lagom.row_split.whole_batch import RowBlock, RowExchange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SUMMED = (torch.float32, torch.float64)
"""Types of losses that are summed over ranks; in shorter ones a sum overflows where the mean does not."""


def call_by_rows(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return ``func(*args, **kwargs)``, computed by rows; ``NOT_BY_ROWS`` if it is not known that this is right."""
    handler = _HANDLERS.get(func)
    if handler is None:
        return NOT_BY_ROWS
    if func in _LOSSES:
        return handler(func, args, kwargs)
    source = args[0] if args else None
    if not isinstance(source, RowShardedTensor) or not source.is_pending or source.is_gradient:
        return NOT_BY_ROWS
    others = (*args[1:], *kwargs.values())
    if any(isinstance(one, Tensor) for one in others):
        return NOT_BY_ROWS
    return handler(func, source, args[1:], kwargs)


def _rows_of(source: RowShardedTensor) -> Tensor:
    return slice_rows(source, source.exchange, source.factor)


def _along_rows(func: Any, source: RowShardedTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute ``func(source, dim, ...)`` by rows, where ``dim`` is not the dimension of the rows."""
    dim = kwargs.get("dim", args[0] if args else None)
    if not isinstance(dim, int) or not -source.dim() <= dim < source.dim() or dim % source.dim() == 0:
        return NOT_BY_ROWS
    return _new(source, func(_rows_of(source), *args, **kwargs))


def _view(
    source: RowShardedTensor, view: Callable[[Tensor], Tensor], rows_view: Callable[[Tensor], Tensor], factor: int
) -> RowShardedTensor:
    """Return a row-sharded ``view(source)``, of which each rank has ``rows_view`` of its rows."""
    stride = view(torch.empty_strided(source.shape, source.stride(), device="meta")).stride()
    return row_sharded_view(source, view, rows_view(_rows_of(source)), factor, stride)


def _reshape(func: Any, source: RowShardedTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Reshape rows where each row of the result belongs to one sample: elements stay in order."""
    if any(isinstance(one, torch.dtype) for one in args):
        return NOT_BY_ROWS
    if not source.is_contiguous():
        if func is Tensor.view:
            return NOT_BY_ROWS
        source = _contiguous(func, source, (), {})
        if not isinstance(source, RowShardedTensor):
            return NOT_BY_ROWS
    shape = func(torch.empty(source.shape, device="meta"), *args, **kwargs).shape
    block = source.exchange.block
    if not shape or not shape[0] or shape[0] % block.num_all:
        return NOT_BY_ROWS
    factor = shape[0] // block.num_all
    num_mine = factor * block.num_mine
    return _view(source, lambda whole: whole.view(shape), lambda rows: rows.reshape(num_mine, *shape[1:]), factor)


def _select(func: Any, source: RowShardedTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Index other dimensions than that of the rows by numbers and slices."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if not index or not all(one is Ellipsis or isinstance(one, (int, slice)) for one in index):
        return NOT_BY_ROWS
    if any(isinstance(one, bool) for one in index):
        return NOT_BY_ROWS
    keeps_rows = index[0] == slice(None) or (index[0] is Ellipsis and len(index) <= source.dim())
    if not keeps_rows:
        return NOT_BY_ROWS
    return _same_rows(func, source, (index,), kwargs)


def _transpose(func: Any, source: RowShardedTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if kwargs or len(args) != 2 or any(dim % source.dim() == 0 for dim in args):
        return NOT_BY_ROWS
    return _same_rows(func, source, args, kwargs)


def _same_rows(func: Any, source: RowShardedTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Make a view that leaves the rows where they are."""

    def view(tensor: Tensor) -> Tensor:
        viewed: Tensor = func(tensor, *args, **kwargs)
        return viewed

    return _view(source, view, view, source.factor)


def _contiguous(func: Any, source: RowShardedTensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if args or kwargs:
        return NOT_BY_ROWS
    return source if source.is_contiguous() else _new(source, _rows_of(source).contiguous())


def _new(source: RowShardedTensor, rows: Tensor) -> Tensor:
    """Return a tensor of its own that has the ``rows`` on this rank."""
    return gather_blocks([rows], source.exchange, [source.factor], source.signed, postpone=True)[0]


def _loss(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a loss of torch's: each rank computes it of its rows, and their sums travel."""
    given = _bound(func, args, kwargs)
    if given is None:
        return NOT_BY_ROWS
    outputs, targets, reduction = given["input"], given["target"], given["reduction"]
    source = next((one for one in (outputs, targets) if isinstance(one, RowShardedTensor)), None)
    if source is None or not source.is_pending or source.is_gradient or not _has_rows(func, given):
        return NOT_BY_ROWS
    divisor = 1 if reduction == "sum" else _divisor(func, given)
    rows = {name: slice_rows(given[name], source.exchange, source.factor) for name in ("input", "target")}
    try:
        found = func(**{**given, **rows, "reduction": "none" if reduction == "none" else "sum"})
    except Exception:  # raised again, with one process's words, when all ranks have all rows
        found = None
    if reduction == "none":
        return NOT_BY_ROWS if found is None else _new(source, found)
    total = _sum_over_ranks(source, found)
    return NOT_BY_ROWS if total is None else total / divisor


def _bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by name; None where they are wrong or of a kind that is not computed by rows."""
    try:
        given = _signature(func).bind(*args, **kwargs)
    except TypeError:
        return None
    given.apply_defaults()
    old_style = given.arguments.get("size_average") is not None or given.arguments.get("reduce") is not None
    return None if old_style else given.arguments


@cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _has_rows(func: Any, given: Mapping[str, Any]) -> bool:
    """Return whether outputs and targets have a row for each sample, and nothing else has."""
    outputs, targets = given["input"], given["target"]
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or given["reduction"] not in _REDUCTIONS:
        return False
    if outputs.dtype not in _SUMMED and not torch.is_autocast_enabled(outputs.device.type):
        return False
    if func not in _CLASSES:
        fits = given.get("weight") is None and _has_no_rows(given.get("pos_weight"), outputs)
        return fits and outputs.shape == targets.shape
    return outputs.dim() > 1 and targets.dim() > 0 and targets.shape[0] == outputs.shape[0]


def _has_no_rows(weight: Tensor | None, outputs: Tensor) -> bool:
    return weight is None or weight.dim() < outputs.dim()


def _divisor(func: Any, given: Mapping[str, Any]) -> Any:
    """Return what torch divides the sum of the loss by for its mean."""
    outputs, targets = given["input"], given["target"]
    if given["reduction"] == "batchmean":
        return outputs.shape[0]
    if func not in _CLASSES:
        return outputs.numel()
    if targets.is_floating_point():  # probabilities of classes
        return outputs.numel() // outputs.shape[1]
    counts = targets != given["ignore_index"]
    weight = given["weight"]
    return counts.sum() if weight is None else weight[targets.where(counts, 0)].where(counts, 0).sum()


def _sum_over_ranks(source: RowShardedTensor, found: Tensor | None) -> Tensor | None:
    """Return the sum of the ranks' numbers ``found``; None if one of them has none. A collective."""
    block = source.exchange.block
    ranks = RowExchange(source.exchange.gatherer, RowBlock(block.rank, block.world_size, block.world_size), _PLACE)
    number = torch.zeros((), dtype=_number_type(source), device=source.device) if found is None else found
    parts = [number.reshape(1)]
    if source.device.type == "cpu":  # a GPU tells of wrong labels later, and otherwise
        parts.append(torch.tensor([found is None]))
    totals = gather_blocks(parts, ranks, [1] * len(parts), source.signed)
    if len(parts) > 1 and bool(totals[1].any()):
        return None
    return totals[0].sum()


def _number_type(source: RowShardedTensor) -> torch.dtype:
    return source.dtype if source.dtype in _SUMMED else torch.float32


_PLACE = "the sum of a loss"
_REDUCTIONS = ("none", "mean", "sum", "batchmean")
_CLASSES = (F.cross_entropy, F.nll_loss)
"""Losses of scores for classes, whose mean is weighted."""
_LOSSES = frozenset(
    (
        *_CLASSES,
        *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div),
        *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    )
)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin), _along_rows),
    **dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax), _along_rows),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax, F.log_softmax), _along_rows),
    **dict.fromkeys((torch.reshape, Tensor.reshape, Tensor.view, torch.flatten, Tensor.flatten), _reshape),
    **dict.fromkeys((torch.transpose, Tensor.transpose), _transpose),
    **dict.fromkeys((torch.detach, Tensor.detach), _same_rows),
    Tensor.__getitem__: _select,
    Tensor.contiguous: _contiguous,
    **dict.fromkeys(_LOSSES, _loss),
}
