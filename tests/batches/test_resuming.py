"""Loaders that save their position and continue from it, as torchdata's ``StatefulDataLoader`` does.

torchdata is not among the pinned packages: ``Resuming`` treats samplers as its loader does, with one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from lagom.config.torch_distributed import Batches
from lagom.session.session import Session
from tests.ranks import alone, run_ranks
from tests.session.loading import Numbers, flat


class Resuming(DataLoader[Any]):
    state: dict[str, Any] | None = None
    last: Any = None

    def __iter__(self) -> Any:
        self.last, self.state = ResumingIterator(self, self.state), None
        return self.last

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self.last.state_dict()
        return found


class ResumingIterator(_BaseDataLoaderIter):
    def __init__(self, loader: Any, state: dict[str, Any] | None) -> None:
        super().__init__(loader)
        self._yielded = 0
        self._fetcher = _DatasetKind.create_fetcher(
            self._dataset_kind, loader.dataset, self._auto_collation, self._collate_fn, self._drop_last
        )
        if state is not None:
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        self._yielded = state["yielded"]
        if has_state(self._index_sampler) or has_state(self._sampler_iter):
            if has_state(self._index_sampler):
                self._index_sampler.load_state_dict(state["sampler"])
            self._sampler_iter = iter(self._index_sampler)
            if state["iterator"] is not None and has_state(self._sampler_iter):
                self._sampler_iter.load_state_dict(state["iterator"])
        else:
            self._sampler_iter = itertools.islice(self._index_sampler, self._yielded, None)

    def _next_data(self) -> Any:
        index = next(self._sampler_iter)
        self._yielded += 1
        return self._fetcher.fetch(index)

    def state_dict(self) -> dict[str, Any]:
        states = [one.state_dict() if has_state(one) else None for one in (self._index_sampler, self._sampler_iter)]
        return {"yielded": self._yielded, "sampler": states[0], "iterator": states[1]}


def has_state(value: Any) -> bool:
    """Check for methods of the class, as ``isinstance`` does with a protocol, whatever ``__getattr__`` gives."""
    return hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict")


class Shuffling(Sampler[int]):
    """A sampler whose iterator can save its position, as torchdata's."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self) -> Iterator[int]:
        return ShufflingIterator(self)

    def __len__(self) -> int:
        return self.count


class ShufflingIterator:
    def __init__(self, sampler: Shuffling) -> None:
        self.sampler = sampler
        self.start = sampler.generator.get_state()
        self.order = torch.randperm(sampler.count, generator=sampler.generator).tolist()
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.position == len(self.order):
            raise StopIteration
        self.position += 1
        found: int = self.order[self.position - 1]
        return found

    def state_dict(self) -> Any:
        return {"start": self.start, "position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.sampler.generator.set_state(state["start"])
        self.__init__(self.sampler)  # type: ignore[misc]
        self.position = state["position"]


class Batching(BatchSampler):
    def __iter__(self) -> Any:
        return BatchingIterator(self)


class BatchingIterator:
    def __init__(self, sampler: Batching) -> None:
        self.sampler = sampler
        self.items = iter(sampler.sampler)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> list[int]:
        found = list(itertools.islice(self.items, self.sampler.batch_size))
        if not found:
            raise StopIteration
        return found

    def state_dict(self) -> Any:
        return self.items.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self.items = iter(self.sampler.sampler)
        self.items.load_state_dict(state)  # type: ignore[attr-defined]


class Remembering(Batching):
    """A batch sampler that also has a state of its own."""

    epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return super().__iter__()

    def state_dict(self) -> Any:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: Any) -> None:
        self.epoch = state["epoch"] - 1


class Fixed(Sampler[Any]):
    """A sampler without a state: the loader skips the batches that it has given."""

    def __iter__(self) -> Iterator[Any]:
        yield from ([5, 3, 1, 0], [2, 4, 6], [7, 8, 9, 10], [11, 12])


def resumed(kind: str) -> Any:
    """Return the batches until a break, those of a loader that continues from there, and those of the next epoch."""

    def make() -> Resuming:
        sampler: Any = Fixed() if kind == "skips" else Batching(Shuffling(13), 4, drop_last=False)
        if kind == "remembers":
            sampler = Remembering(Shuffling(13), 4, drop_last=False)
        return Resuming(Numbers(13), batch_sampler=sampler)

    loader, seen = make(), []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 2:
            state = loader.state_dict()
            break
    loader = make()
    loader.state = state
    seen += [batch.tolist() for batch in loader]
    seen += [batch.tolist() for batch in loader]
    return seen, state["yielded"], state["sampler"], getattr(loader.batch_sampler, "epoch", None)


@pytest.mark.parametrize(
    ("batches", "world_size"),
    [
        ("split", 3),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in (("whole", 2), ("split", 2), ("whole", 3))),
    ],
)
def test_a_loader_goes_on_where_it_was(batches: Batches, world_size: int) -> None:
    def run(session: Session) -> Any:
        return {kind: resumed(kind) for kind in ("shuffles", "remembers", "skips")}

    plain, ranks = alone(run), run_ranks(world_size, run, batches=batches)
    assert all(flat([found[0][:4]]) == list(range(13)) for found in plain.values())
    for kind, (seen, *state) in plain.items():
        assert [rank[kind][1:] for rank in ranks] == [tuple(state)] * world_size
        for k, batch in enumerate(seen):
            mine = [rank[kind][0][k] for rank in ranks]
            if batches == "whole":
                assert mine == [batch] * world_size
            else:  # a rank without a sample has a copy
                assert {*sum(mine, [])} == {*batch}  # noqa: RUF017
