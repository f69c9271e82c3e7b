"""Fetching of samples without workers: a whole batch at once where possible, with the right random stream."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from lagom.batches.iterable import is_iterable
from lagom.batches.self_sharded import shards_itself
from lagom.batches.tensor_dataset_fetch import choose_fetcher, fetches_as_torch_does
from lagom.run_state.random_streams import DRAWING

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from lagom.run_state.random_streams import OwnStreams
    from lagom.session.session import Session

PASS = "_lagom_pass"
"""Attribute of a loader's iterator that holds its ``LoaderPass``."""


def make_iterator_init(session: Session, streams: OwnStreams) -> Any:
    """Return a ``_SingleProcessDataLoaderIter.__init__`` that chooses the fetcher and its random stream."""
    original = vars(_SingleProcessDataLoaderIter)["__init__"]
    findings: list[Any] = []

    def patched_init(self: Any, loader: DataLoader[Any]) -> None:
        original(self, loader)
        current = self.__dict__.get(PASS)
        if session.live and current is not None:
            self._dataset_fetcher = choose_fetcher(self._dataset_fetcher)
        if not session.live or current is None or _is_plain(loader.dataset):
            return
        if current.training and current.is_split and not is_iterable(loader):
            self._dataset_fetcher = _OwnRandomFetcher(self._dataset_fetcher, streams)
        elif session.distributed:
            own = self._dataset_fetcher
            self._dataset_fetcher = whole = _LockedFetcher(own, session)
            from lagom.batches.sharing.divided_fetch import DividedFetcher, Findings, can_divide

            if fetches_as_torch_does() and can_divide(session, own, current):
                findings[:] = findings or [Findings()]
                finding = findings[0].find(session, loader)
                self._dataset_fetcher = DividedFetcher(own, whole, session, finding, current)

    return patched_init


def make_create_fetcher(session: Session, streams: OwnStreams) -> Any:
    """Return a ``_DatasetKind.create_fetcher`` with which self-sharded data sets draw from the rank's own streams."""
    original: Any = _DatasetKind.create_fetcher

    def create_fetcher(kind: Any, dataset: Any, *args: Any) -> Any:
        if not session.live or not shards_itself(dataset):
            return original(kind, dataset, *args)
        with streams.in_fetch():  # iter() of a data set may draw
            return _OwnRandomFetcher(original(kind, dataset, *args), streams)

    return create_fetcher


class _OwnRandomFetcher:
    """A loader's fetcher that draws from the rank's own random streams."""

    def __init__(self, fetcher: Any, streams: OwnStreams) -> None:
        self._fetcher = fetcher
        self._streams = streams

    def fetch(self, index: Any) -> Any:
        with self._streams.in_fetch():
            return self._fetcher.fetch(index)


class _LockedFetcher:
    """A loader's fetcher that holds ``DRAWING`` in the program's threads, as draws from the common stream must."""

    def __init__(self, fetcher: Any, session: Session) -> None:
        self._fetcher = fetcher
        self._session = session

    def fetch(self, index: Any) -> Any:
        with DRAWING if self._session.is_in_thread else nullcontext():
            return self._fetcher.fetch(index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)


def _is_plain(dataset: object) -> bool:
    """Return whether reading samples of ``dataset`` certainly draws no random numbers; a ``collate_fn`` still may."""
    if type(dataset) is Subset:
        return _is_plain(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_is_plain(part) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, list)
