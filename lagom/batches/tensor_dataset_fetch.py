"""``choose_fetcher``: fetch a batch of a ``TensorDataset`` by indexing each tensor once, not once for each sample."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate, default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher

if TYPE_CHECKING:
    from collections.abc import Sequence

_METHODS = (
    (TensorDataset, "__getitem__"),
    (Subset, "__getitem__"),
    (Subset, "__getitems__"),
    (_MapDatasetFetcher, "fetch"),
)
"""Methods that a program may have replaced, to count or time samples; the faster fetcher would not call them."""
_INT = {int}
_TORCHS = [vars(owner)[name] for owner, name in _METHODS]


def fetches_as_torch_does() -> bool:
    """Return whether no program has replaced torch's way to fetch the samples of a batch, as to count them."""
    return vars(_MapDatasetFetcher)["fetch"] is _TORCHS[_METHODS.index((_MapDatasetFetcher, "fetch"))]


def choose_fetcher(fetcher: Any) -> Any:
    """Return ``fetcher``, or a faster one that gives the same batches, bit for bit."""
    if type(fetcher) is not _MapDatasetFetcher or not fetcher.auto_collation:
        return fetcher
    if fetcher.collate_fn is not default_collate or not _collates_as_torch_does():
        return fetcher
    if [vars(owner)[name] for owner, name in _METHODS] != _TORCHS:
        return fetcher
    subsets, dataset = [], fetcher.dataset
    while type(dataset) is Subset and type(dataset.indices) in (list, range, tuple):
        subsets.append(dataset)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or "__getitems__" in vars(dataset):
        return fetcher
    if any("__getitems__" in vars(subset) for subset in subsets):
        return fetcher
    return _TensorFetcher(fetcher, subsets, dataset) if all(map(_is_simple, dataset.tensors)) else fetcher


class _TensorFetcher:
    """A loader's fetcher that leaves all unusual cases, and errors, to the fetcher that it replaces."""

    def __init__(self, fetcher: Any, subsets: Sequence[Any], dataset: Any) -> None:
        self._fetcher = fetcher
        self._subsets = subsets
        self._dataset = dataset
        self._tensors = dataset.tensors

    def fetch(self, index: Any) -> Any:
        """Return the batch of the samples with the indices ``index``."""
        found = self._index_tensors(index)
        return self._fetcher.fetch(index) if found is None else found

    def _index_tensors(self, index: Any) -> list[torch.Tensor] | None:
        tensors = self._tensors
        if type(index) is not list or self._dataset.tensors is not tensors:
            return None
        try:
            for subset in self._subsets:
                indices = subset.indices
                index = [indices[i] for i in index]
            # array("q") would take True or a tensor as a number, but tensor[True] has another shape.
            if set(map(type, index)) != _INT:
                return None
            for tensor in tensors:
                if tensor.requires_grad:
                    return None
            places = torch.frombuffer(array("q", index), dtype=torch.int64)  # takes half the time of torch.tensor
            return [tensor.index_select(0, places) for tensor in tensors]
        except (IndexError, TypeError, RuntimeError, OverflowError):  # negative or missing indices
            return None


def _collates_as_torch_does() -> bool:
    """Return whether ``default_collate`` handles tuples and tensors as torch defines."""
    kinds = [kind for key in default_collate_fn_map for kind in (key if isinstance(key, tuple) else (key,))]
    return default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn and not any(
        issubclass(tuple, k) for k in kinds
    )


def _is_simple(tensor: torch.Tensor) -> bool:
    """Return whether ``index_select`` on ``tensor`` equals ``torch.stack`` of its rows, including strides."""
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad:
        return False
    if not tensor.dim() or not len(tensor) or not tensor.is_contiguous():
        return False
    if tensor.dim() < 4:  # torch.stack has a choice of strides only for four dimensions and more
        return True
    two = tensor.index_select(0, torch.zeros(2, dtype=torch.int64, device="cpu"))
    return two.stride() == torch.stack([tensor[0], tensor[0]]).stride()
