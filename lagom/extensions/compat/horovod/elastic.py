"""``hvd.elastic`` for a run that keeps its ranks: states are broadcast from rank 0 when the function starts.

If a lagom run loses a rank, it begins again from the beginning, or ends with an error. So no state is ever restored.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Sampler

from lagom.extensions.compat.horovod import topology
from lagom.extensions.compat.horovod.broadcasting import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__path__: list[str] = []  # horovod.torch.elastic.state and sampler are found below it


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function(state, ...)`` as a function that first calls ``state.sync()``, to start from rank 0's state."""

    @functools.wraps(function)
    def running(state: Any, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        return function(state, *args, **kwargs)

    return running


class TorchState:
    """Attributes, given by keyword, that ``sync`` makes equal on all ranks."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        vars(self).update(model=model, optimizer=optimizer, **kwargs)

    def sync(self) -> None:
        """Replace modules, optimizers, samplers and all other attributes by those of rank 0."""
        others = {}
        for name, value in sorted(vars(self).items()):
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), 0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, 0)
            elif isinstance(value, ElasticSampler):
                value.load_state_dict(broadcast_object(value.state_dict(), 0, "elastic.sampler"))
            else:
                others[name] = value
        vars(self).update(broadcast_object(others, 0, "elastic.state"))

    def commit(self) -> None:
        """Do nothing: the ranks of a run never change, so no saved state is ever needed."""

    save = check_host_updates = commit

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Accept functions for when ranks change, which they never do."""


ObjectState = TorchState


class ElasticSampler(Sampler[int]):
    """Shards the samples of an epoch that are not processed; the first are repeated to give all ranks equally many.

    Args:
        dataset: a data set of constant length.
        shuffle: use another order in each epoch, equal on all ranks.
        seed: seed of these orders.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.load_state_dict({"epoch": 0, "processed_num": 0})

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch with all samples; programs call this at the end of the previous epoch."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of this size as processed on every rank."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue from the result of ``state_dict``."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Shard the samples that are not processed."""
        self.num_replicas, self.rank = topology.size(), topology.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        padded = list(itertools.islice(itertools.cycle(self.remaining_indices), self.total_size))
        return iter(padded[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
