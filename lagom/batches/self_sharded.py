"""Data sets that shard themselves and have the attribute ``lagom_sharded``: each rank gets different batches."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lagom.errors import DivergenceError
from lagom.exchange.agreement_exchange import signature
from lagom.run_state.batch_contents import count_rows, count_samples, tensors
from lagom.run_state.loader_pass import BatchShare
from lagom.world import Place, place_set

if TYPE_CHECKING:
    from collections.abc import Callable

    from lagom.session.session import Session

_PLACE = "a batch of a data set that shards itself"


def shards_itself(dataset: object) -> bool:
    """Return whether ``dataset`` gives every rank samples of its own: its attribute ``lagom_sharded`` is true."""
    # torch's loader wraps a datapipe in an object with the attribute ``_datapipe``.
    dataset = vars(dataset).get("_datapipe", dataset) if hasattr(dataset, "__dict__") else dataset
    return bool(getattr(dataset, "lagom_sharded", False))


class RankCollate:
    """A loader's ``collate_fn`` that takes the rank along to spawned workers.

    A data set finds its part by ``lagom.rank()``, which forked workers inherit and spawned workers do not.
    """

    def __init__(self, session: Session, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._place = Place(session.rank, session.world_size, session.local_rank, session.local_world_size)

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_collate, (self._collate, self._place)


_worker_contexts = ExitStack()


def _restore_collate(collate: Any, place: Place) -> Any:
    _worker_contexts.enter_context(place_set(place))  # for the life of the worker
    return collate


class SelfShardedSource:
    """Takes batches of a self-sharded data set; the ranks' batches of one step make one global batch.

    One exchange for each batch (1 to 2 ms over gloo) sums its samples. A rank whose data set ends before the others'
    gets its last batch again, so that all ranks take the same number of steps. The repeated batch has weight 0, and is
    cut to one sample if all of its tensors have one row for each sample.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: Any = None
        self._has_last = False
        self._ended = False

    def take(self, fetch: Callable[[Any], Any], source: Any) -> tuple[Any, BatchShare | None]:
        """Return the next batch, ``fetch(source)``, and its share of the global batch.

        The share is None in a thread of the program, where ranks cannot exchange their counts.

        Raises:
            StopIteration: when the data sets of all ranks have ended; in a thread, when that of this rank has.
            DivergenceError: on all ranks, when some ranks have a batch and others none at all, or ranks are at
                different places.
        """
        if not self._session.may_meet:
            self._session.say_once(_IN_A_THREAD)
            return fetch(source), None
        data, num_mine = None, 0
        if not self._ended:
            try:
                data = fetch(source)
                num_mine = count_samples(data)
            except StopIteration:
                self._ended = True
        share, num_without = self._agree_on_share(num_mine)
        if share is None:
            raise StopIteration
        if num_without:
            raise DivergenceError(
                f"a data set that shards itself (lagom_sharded) has no batch for {num_without} of "
                f"{self._session.world_size} ranks; give every rank at least one"
            )
        if self._ended:
            return self._last, share
        self._last, self._has_last = cut_to_first_sample(data, num_mine), True
        return data, share

    def recount(self, data: Any, share: BatchShare) -> BatchShare:
        """Return the share of a batch whose transform may have changed the number of rows; a collective.

        In a thread of the program, or if no rank has a row left, return ``share`` unchanged.

        Args:
            data: this rank's rows, after the transform.
            share: the share before the transform.

        Raises:
            DivergenceError: on all ranks, if they are at different places of the program.
        """
        if not self._session.may_meet:
            self._session.say_once(_NOT_COUNTED)
            return share
        count = count_rows(data) if share.num_mine else 0
        agreed, _ = self._agree_on_share(share.num_mine if count is None else count)
        return share if agreed is None or not agreed.num_all else agreed

    def _agree_on_share(self, num_mine: int) -> tuple[BatchShare | None, int]:
        """Return this rank's share (None if no rank has a batch) and how many ranks never had one; a collective."""
        session = self._session
        assert session.backwards.agreement is not None
        assert session.backwards.divergence is not None
        never = self._ended and not self._has_last
        row = [num_mine, num_mine * num_mine, not self._ended, never]
        numbers = torch.tensor(row, dtype=torch.float64, device="cpu")
        if not session.backwards.agreement.sum(numbers, signature(_PLACE.encode())):
            session.backwards.divergence.find_divergence(_PLACE)
            raise DivergenceError("other ranks were not at the next batch of a data set that shards itself")
        total, squares, num_alive, num_without = (int(number) for number in numbers.tolist())
        if not num_alive:
            return None, 0
        return BatchShare(num_mine, total, session.world_size * squares == total * total), num_without


_IN_A_THREAD = (
    "batches of a data set that shards itself are drawn in a thread of the program's own: they count alike on all "
    "ranks, however many samples they have"
)


_NOT_COUNTED = (
    "batches whose transform leaves rows out or adds some are drawn in a thread of the program's own: they are "
    "weighted by the rows that were read"
)


def cut_to_first_sample(data: Any, count: int) -> Any:
    """Return ``data`` with its tensors and arrays cut to one row if all tensors have ``count`` rows, else unchanged."""
    found = tensors(data)
    if not found or any(not tensor.dim() or len(tensor) != count for tensor in found):
        return data
    return _cut(data)


def _cut(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        # A copy, since a view would be taken for a part of the original batch, with that batch's share.
        return data[:1].clone()
    if isinstance(data, np.ndarray):
        return data[:1]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_cut(part) for part in data))
    if type(data) in (list, tuple):
        return type(data)(_cut(part) for part in data)
    if type(data) is dict:
        return {key: _cut(part) for key, part in data.items()}
    return data
