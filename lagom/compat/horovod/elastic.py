"""``hvd.elastic`` for a run that keeps its ranks: states are saved, restored and broadcast, and never resized.

A lagom run that loses a rank ends with an error that names it.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Sampler

from lagom.compat.horovod import topology
from lagom.compat.horovod.broadcasting import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from lagom.compat.horovod.exceptions import HorovodInternalError
from lagom.compat.horovod.served_modules import PATH

__path__ = [PATH]  # horovod.torch.elastic.state and sampler are found below it


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Broadcast the state before ``function(state, ...)``, and restore it when an exchange fails."""

    @functools.wraps(function)
    def running(state: Any, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        try:
            return function(state, *args, **kwargs)
        except HorovodInternalError:
            state.restore()
            raise

    return running


class ObjectState:
    """Keeps attributes, given by keyword, equal on all ranks. Their values are replaced, not changed."""

    def __init__(self, **kwargs: Any) -> None:
        self._saved = kwargs
        self._reset_callbacks: list[Callable[[], None]] = []
        vars(self).update(kwargs)

    def save(self) -> None:
        """Remember the values of the attributes."""
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        """Return to the values that were saved last."""
        vars(self).update(self._saved)

    def sync(self) -> None:
        """Replace and save the values by those of rank 0."""
        if self._saved:
            self._saved = broadcast_object({name: getattr(self, name) for name in self._saved}, 0, "elastic.state")
            vars(self).update(self._saved)

    def commit(self) -> None:
        """Save; the ranks of a run never change, so there is nothing else to check."""
        self.save()

    def check_host_updates(self) -> None:
        """Do nothing: the ranks of a run never change."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions for ``on_reset`` to call."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks; lagom never does, because ranks never change."""
        for callback in self._reset_callbacks:
            callback()


class TorchState(ObjectState):
    """Keeps modules, optimizers and samplers, by their state dicts, and other attributes as they are."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        attributes = {"model": model, "optimizer": optimizer, **kwargs}
        self._tracked = {name: value for name, value in attributes.items() if isinstance(value, _TRACKED)}
        vars(self).update(self._tracked)
        super().__init__(**{name: value for name, value in attributes.items() if name not in self._tracked})
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in vars(self).get("_tracked", {}):
            self._tracked[name] = value
            self._states[name] = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Remember all states and values."""
        self._states = {name: copy.deepcopy(value.state_dict()) for name, value in self._tracked.items()}
        super().save()

    def restore(self) -> None:
        """Return to the states and values that were saved last."""
        for name, state in self._states.items():
            self._tracked[name].load_state_dict(copy.deepcopy(state))
        super().restore()

    def sync(self) -> None:
        """Replace and save all states and values by those of rank 0."""
        for value in self._tracked.values():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), 0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, 0)
            else:
                value.load_state_dict(broadcast_object(value.state_dict(), 0, "elastic.sampler"))
        super().sync()
        self.save()


class ElasticSampler(Sampler[int]):
    """Shards the samples of an epoch that are not processed; the first are repeated where they do not divide.

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
        num_missing = self.total_size - len(self.remaining_indices)
        padded = self.remaining_indices + self.remaining_indices[:num_missing]
        return iter(padded[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


_TRACKED = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
