"""``lagom.batches.tensor_dataset_fetch``: batches equal those of torch's own fetcher, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, random_split
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lagom.batches.tensor_dataset_fetch import choose_fetcher
from tests.ranks import alone, run_ranks

TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def fetcher(dataset: Any, collate: Any = default_collate) -> Any:
    return _MapDatasetFetcher(dataset, True, collate, False)


def tensors() -> list[torch.Tensor]:
    found = [torch.randint(0, 2, (20, *rest)).to(dtype) for dtype in TYPES for rest in ((), (3,), (1, 5, 5), (2, 1, 1))]
    return [*found, torch.randn(20, 0), torch.randn(20, 3, 2, 2, 2)]


def same(dataset: Any, *batches: Any) -> None:
    ours, theirs = choose_fetcher(fetcher(dataset)), fetcher(dataset)
    assert type(ours) is not type(theirs)
    for index in batches:
        found, wanted = ours.fetch(index), theirs.fetch(index)
        assert type(found) is type(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one, other)
            assert (one.dtype, one.stride(), one.requires_grad) == (other.dtype, other.stride(), other.requires_grad)


def test_batches_have_the_bits_and_strides_of_torchs() -> None:
    whole = TensorDataset(*tensors())
    same(whole, [3], [0, 19, 4, 4], list(range(20)), [-1, 2], (1, 2), range(3), [True, True], torch.tensor([1, 2]))
    same(Subset(whole, [5, -2, 7]), [0], [2, 1, -1], [0, 0])
    same(Subset(Subset(whole, range(3, 15)), [1, 0, 4, 9]), [3, 2, 1], [-4])
    same(random_split(whole, [5, 15])[1], [14, 0])


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] * 2 for tensor in self.tensors)


def test_what_differs_from_torchs_own_is_fetched_sample_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TensorDataset(torch.randn(5, 2))
    transposed = torch.randn(3, 5).t()
    channels_last = torch.randn(5, 3, 4, 4).to(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(torch.randn(5))
    others: list[Dataset[Any]] = [Doubled(torch.randn(5, 2)), Subset(Doubled(torch.randn(5)), [0, 1])]
    others += [TensorDataset(one) for one in (transposed, channels_last, parameter, torch.randn(5).requires_grad_())]
    for dataset in others:
        made = fetcher(dataset)
        assert choose_fetcher(made) is made
    for made in (fetcher(plain, lambda samples: samples), _MapDatasetFetcher(plain, False, default_collate, False)):
        assert choose_fetcher(made) is made
    fetch: Any = _MapDatasetFetcher.fetch
    with monkeypatch.context() as counting:
        counting.setattr(_MapDatasetFetcher, "fetch", lambda self, index: fetch(self, index))
        made = fetcher(plain)
        assert choose_fetcher(made) is made
    monkeypatch.setitem(default_collate_fn_map, tuple, lambda batch, *, collate_fn_map: "theirs")
    assert choose_fetcher(fetcher(plain)).fetch([0]) == "theirs"
    monkeypatch.delitem(default_collate_fn_map, tuple)
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda self, index: (torch.tensor(index),))
    assert choose_fetcher(fetcher(plain)).fetch([4])[0].tolist() == [4]


def test_what_changes_meanwhile_is_seen() -> None:
    dataset = TensorDataset(torch.arange(5.0))
    made = choose_fetcher(fetcher(dataset))
    dataset.tensors[0][0] = 7
    assert made.fetch([0])[0].tolist() == [7]
    dataset.tensors[0].requires_grad_()
    assert made.fetch([0])[0].requires_grad
    dataset.tensors = (torch.zeros(2),)
    assert made.fetch([0])[0].tolist() == [0]


@pytest.mark.parametrize("index", [[5], [-6], [1.5], ["a"], [2**70], []])
def test_errors_are_torchs(index: Any) -> None:
    dataset = TensorDataset(torch.arange(5.0))
    said = []
    for made in (fetcher(dataset), choose_fetcher(fetcher(dataset))):
        with pytest.raises(Exception) as caught:  # noqa: PT011  (any error: both must raise the same)
            made.fetch(index)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_loader_of_a_run_takes_batches_at_once(world_size: int) -> None:
    def batches(*_: object) -> list[Any]:
        loader = DataLoader(TensorDataset(torch.arange(40.0), torch.arange(40)), batch_size=4, shuffle=True)
        iterator = iter(loader)
        found = [[part.tolist() for part in batch] for batch in iterator]
        return [type(iterator._dataset_fetcher).__module__, found]  # type: ignore[attr-defined]

    def run(session: Any) -> list[Any]:
        session.evaluates_by_mode = lambda: False
        return batches()

    name, wanted = alone(batches)
    assert name == _MapDatasetFetcher.__module__
    for rank, (name, found) in enumerate(run_ranks(world_size, run)):
        assert name == choose_fetcher.__module__
        assert found == [[part[rank::world_size] for part in batch] for batch in wanted]


def profiled(_: object = None) -> list[str]:
    loader = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=4)
    batches = iter(loader)
    next(batches)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        next(batches)
    next(batches)
    return [event.name for event in profile.events() if "DataLoader" in event.name]


def test_a_profiler_sees_batches_as_in_a_plain_program() -> None:
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    assert profiled() == [name]
    assert run_ranks(2, profiled) == [[name]] * 2
