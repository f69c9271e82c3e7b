"""``activations``: computes from shapes how many bytes a forward keeps for its backward."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lagom.extensions.zero.memory_plan.meta_modules import without_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class Activations(NamedTuple):
    """Memory that the largest share of a batch keeps between forward and backward."""

    num_bytes: int
    num_samples: int | None
    """Samples in that share; None if no tensor of the batch has a first dimension."""


def activations(module: nn.Module, batch: Any, num_shares: int, dtype: torch.dtype | None) -> Activations:
    """Count the bytes of inputs, outputs and tensors saved by autograd, for the largest of the shares of ``batch``.

    The forward runs in training mode on fake tensors (torch's FakeTensorMode): it computes shapes, no values, and does
    not change ``module``. Memory that several tensors share counts once. Parameters and buffers do not
    count. Checkpoints count with the tensors that they save. oneDNN's LSTM on a CPU keeps twice the counted bytes.

    Args:
        batch: the arguments of ``module``: a tensor, a tuple or list of arguments, or a dict of them by name.
        num_shares: number of shares into which the rows of the batch are cut.
        dtype: autocast's type; None without autocast.

    Raises:
        ValueError: if the forward fails, or depends on values of tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    rows = _rows(batch)
    share = None if rows is None else -(-rows // num_shares)

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def part(tensor: torch.Tensor) -> torch.Tensor:
        cut = tensor[:share] if tensor.dim() and tensor.shape[0] == rows else tensor
        return empty(cut).requires_grad_(tensor.requires_grad)

    twin = without_numbers(module, empty).train()
    inputs = tree_map_only(torch.Tensor, part, copy.copy(batch))
    args = () if isinstance(inputs, dict) else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    named = inputs if isinstance(inputs, dict) else {}
    own = {_storage(tensor) for tensor in (*twin.parameters(), *twin.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if (key := _storage(tensor)) not in own:
            storages[key] = tensor.untyped_storage()  # kept alive, so that its address is not used again
        return tensor

    for tensor in tree_leaves(inputs):
        if isinstance(tensor, torch.Tensor):
            note(tensor)
    cast = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), mode, by_steps(), cast, hooks:
            for output in tree_leaves(twin(*args, **named)):
                if isinstance(output, torch.Tensor):
                    note(output)
    except Exception as error:
        raise ValueError(
            f"the forward of {type(module).__name__} cannot be followed by shapes alone: {type(error).__name__}: "
            f"{error}. batch is what the module is called with: a tensor, a tuple of arguments or a dict of them; "
            "where the forward itself reads numbers out of tensors, leave batch out and add what activations take"
        ) from error
    return Activations(sum(storage.nbytes() for storage in storages.values()), share)


@contextmanager
def by_steps() -> Iterator[None]:
    """Switch oneDNN off for the length of a block: on fake tensors, its LSTM reports that it saves nothing."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _rows(batch: Any) -> int | None:
    return next((one.shape[0] for one in tree_leaves(batch) if isinstance(one, torch.Tensor) and one.dim()), None)


def _storage(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
