"""``BatchTracker``: finds the batch that a tensor comes from."""

from __future__ import annotations

from typing import Any

import torch

from lagom.errors import LagomError
from lagom.patching.object_reference import HiddenReference
from lagom.run_state.batch_contents import tensors
from lagom.run_state.loader_pass import BatchShare, is_alive, shape_of
from lagom.run_state.loss_terms import find_share

_FEW = 256
"""Number of remembered tensors above which dead ones are first removed."""


class BatchTracker:
    """Tracks the tensors of the batches that the program has seen."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._shares: dict[int, tuple[HiddenReference[torch.Tensor], BatchShare]] = {}
        """Tensor and share by the tensor's id; dead tensors are removed now and then."""
        self._max_shares = _FEW
        self.num_batches = 0
        """Number of training batches that the program has seen."""
        self._sizes: dict[int, float] = {}
        """Weight of each share that the program has seen, by the share's number of samples."""
        self.shapes: set[torch.Size] = set()
        """Shapes of the batches' floating-point tensors with two or more dimensions and more than one number per row.

        Labels have one number per row, and a bias may have their shape.
        """

    def batch(self, share: BatchShare | None) -> None:
        """Count another training batch, and record the size of ``share``; None if this rank has the whole batch."""
        self.num_batches += 1
        if share is not None:
            self._sizes[share.num_mine] = share.weight(self._world_size)

    def remember(self, data: Any, share: BatchShare) -> None:
        """Remember that the tensors in ``data`` belong to ``share``, even if the program trains on them later."""
        # No weakref callbacks: they would take longer than all other work here.
        if len(self._shares) >= self._max_shares:
            # In place, by a copy: another thread of the program may remember its tensors meanwhile.
            for key, entry in self._shares.copy().items():
                if not is_alive(entry[0]) and self._shares.get(key) is entry:
                    self._shares.pop(key, None)
            self._max_shares = max(2 * len(self._shares), _FEW)
        for tensor in tensors(data):
            self._shares[id(tensor)] = HiddenReference(tensor), share
            shape = shape_of(tensor)
            is_new = len(shape) > 1 and shape not in self.shapes
            if is_new and tensor.is_floating_point() and tensor.numel() > len(tensor):
                self.shapes.add(shape)

    def share(self, data: Any) -> BatchShare | None:
        """Return the share of the batch that ``data`` comes from, directly, as a view or through a model; else None."""
        for tensor in tensors(data):
            share = self._find_known_share(tensor)
            if share is None:
                share = find_share(tensor)
            if share is not None:
                return share
        return None

    def is_sample(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` is a tensor of a batch, or a view of one."""
        return self._find_known_share(tensor) is not None

    def _find_known_share(self, tensor: torch.Tensor) -> BatchShare | None:
        # Look for the tensor first, then for its base: a tensor of a batch may be a view, even of an earlier batch.
        entry = self._shares.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        base = tensor._base
        entry = None if base is None else self._shares.get(id(base))
        return entry[1] if entry is not None and entry[0]() is base else None

    def check_rows(self, data: Any, share: BatchShare | None) -> None:
        """Check that ``data``, whose origin is unknown, can come from the batch of ``share``.

        Raises:
            LagomError: when ``data`` has as many rows as this rank's share of another batch, and that share has another
                weight.
        """
        if share is None:
            return
        num_rows = next((tensor.size(0) for tensor in tensors(data) if tensor.dim()), None)
        # A rank without samples of its own gets one sample of weight 0, hence ``max``. Only the first dimension is
        # compared with sizes of batches: another dimension, such as 3 channels, may equal the size of a tail by chance.
        if num_rows is None or num_rows in (max(share.num_mine, 1), share.num_rows):
            return
        if self._sizes.get(num_rows, share.weight(self._world_size)) != share.weight(self._world_size):
            raise LagomError(
                f"a model is called with {num_rows} rows that are made of no batch lagom knows, while the batch "
                f"seen last has {share.num_mine} samples for this rank: one that was taken earlier, it seems, and its "
                "part of the loss cannot be told. Change samples in the data set or in collate_fn, or call the model "
                "with the batch's own tensors, or take a batch_size and a data set that the number of ranks divides, "
                "or use batches='whole'"
            )
