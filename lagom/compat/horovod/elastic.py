"""``hvd.elastic`` in a run that keeps its ranks: states are sent round, saved and restored.

A lagom run that loses a rank ends with an error that names it, so nothing is resumed with fewer.
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

from lagom.compat.horovod import world
from lagom.compat.horovod.broadcasting import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from lagom.compat.horovod.errors import HorovodInternalError
from lagom.compat.horovod.names import PATH

__path__ = [PATH]  # horovod.torch.elastic.state and sampler are found below it


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function(state, ...)``, which is given a state that was sent round. Where an exchange fails it is restored."""

    @functools.wraps(function)
    def running(state: Any, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        try:
            return function(state, *args, **kwargs)
        except HorovodInternalError:
            state.restore()
            raise

    return running


class State:
    """What a program of Horovod's keeps in step on all ranks."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """To be called when ranks came or went."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Ranks came or went."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Ranks neither come nor go."""

    def save(self) -> None:
        """Remember what there is."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Have all ranks go by rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Nothing, unless a program says otherwise."""


class ObjectState(State):
    """Attributes, by keyword; their values are replaced, not changed."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._saved = kwargs
        self.restore()

    def save(self) -> None:
        """Remember the attributes' values."""
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        """Give attributes the values that were saved last."""
        for name, value in self._saved.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Have attributes be those of rank 0."""
        if self._saved:
            self._saved = broadcast_object({name: getattr(self, name) for name in self._saved}, 0, "elastic.state")
            ObjectState.restore(self)


class TorchState(ObjectState):
    """Modules, optimizers and samplers, whose states are kept, and attributes.

    Args:
        model: kept as the attribute of that name.
        optimizer: likewise.
        kwargs: likewise; modules, optimizers and samplers by their states, others as they are.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        everything = {"model": model, "optimizer": optimizer, **kwargs}
        self._tracked = {name: value for name, value in everything.items() if _sync_of(value) is not None}
        for name, value in self._tracked.items():
            object.__setattr__(self, name, value)
        self._states: dict[str, Any] = {}
        super().__init__(**{name: value for name, value in everything.items() if name not in self._tracked})
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in vars(self).get("_tracked", {}):
            self._tracked[name] = value
            self._states[name] = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Remember all states."""
        self._states = {name: copy.deepcopy(value.state_dict()) for name, value in self._tracked.items()}
        super().save()

    def restore(self) -> None:
        """Go back to the states that were saved last."""
        for name, state in self._states.items():
            self._tracked[name].load_state_dict(copy.deepcopy(state))
        super().restore()

    def sync(self) -> None:
        """Have all states be those of rank 0."""
        for value in self._tracked.values():
            sync = _sync_of(value)
            assert sync is not None
            sync(value)
        super().sync()
        self.save()


class ElasticSampler(Sampler[int]):
    """Deals out the samples of an epoch that are not done; the first are dealt twice where they do not come out even.

    Args:
        dataset: of constant length.
        shuffle: another order in each epoch, equal on all ranks.
        seed: of these orders.
    """

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with all samples; to be called at the end of the one before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """A batch of this size is done on every rank."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """How far it is."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from there."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out what is not done among the ranks that there are."""
        self.num_replicas, self.rank = world.size(), world.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        dealt = self.remaining_indices + self.remaining_indices[: self.total_size - len(self.remaining_indices)]
        return iter(dealt[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


def _sync_of(value: Any) -> Callable[[Any], None] | None:
    """What sends round the state of such a value; None for what has none."""
    if isinstance(value, torch.nn.Module):
        return lambda module: broadcast_parameters(module.state_dict(), 0)
    if isinstance(value, torch.optim.Optimizer):
        return lambda optimizer: broadcast_optimizer_state(optimizer, 0)
    if isinstance(value, ElasticSampler):
        return lambda sampler: sampler.load_state_dict(broadcast_object(sampler.state_dict(), 0, "elastic.sampler"))
    return None
