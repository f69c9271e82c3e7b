"""Loaders, patched where they are used: a loader that was built earlier, or arrived by pickle, is found too."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _SingleProcessDataLoaderIter

from lagom.patching.dealing import Dealer
from lagom.patching.device import moved
from lagom.patching.order import synchronise
from lagom.patching.random import OwnStreams, derived
from lagom.patching.replace import replaced
from lagom.patching.session import Pass, Session

if TYPE_CHECKING:
    from collections.abc import Iterator

_PASS = "_lagom_pass"


@contextmanager
def dealt_loaders(session: Session, streams: OwnStreams) -> Iterator[None]:
    """Have loaders yield this rank's share, and count what they yield."""
    with ExitStack() as stack:
        stack.enter_context(replaced(_BaseDataLoaderIter, "__init__", _made(session)))
        stack.enter_context(replaced(_BaseDataLoaderIter, "_reset", _begun_again(session)))
        stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", _yielding(session)))
        if session.world_size > 1:
            index_sampler = property(_index_sampler(session))
            stack.enter_context(replaced(DataLoader, "_index_sampler", index_sampler))
            fetching = _fetching(session, streams)
            stack.enter_context(replaced(_SingleProcessDataLoaderIter, "__init__", fetching))
        yield


def start(session: Session, can_share: bool) -> Pass:
    """Decide what a pass that begins now is: training or evaluation, shared out or not."""
    grad = torch.is_grad_enabled()
    by_mode = grad and session.world_size > 1 and session.evaluates_by_mode()
    training = grad and not by_mode
    shares = session.plan.batches != "whole" if training else session.plan.evaluation == "sharded"
    sharded = can_share and shares
    return Pass(training=training, sharded=sharded, by_mode=by_mode)


def _can_share(session: Session, loader: DataLoader[Any]) -> bool:
    return session.distributed and loader._auto_collation and loader._dataset_kind == _DatasetKind.Map


def _index_sampler(session: Session) -> Any:
    original = vars(DataLoader)["_index_sampler"].fget

    def index_sampler(loader: DataLoader[Any]) -> Any:
        source = original(loader)
        if not session.distributed:
            return source
        # Without the loader: it holds its iterator, which holds this, and workers must end when both are dropped.
        drop_last = bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))
        can_share = _can_share(session, loader)
        return Dealer(session, source, lambda: session.starting or start(session, can_share), drop_last=drop_last)

    return index_sampler


def _begin(session: Session, loader: DataLoader[Any]) -> Pass:
    session.boundary()  # the iterator draws from the common stream
    current = start(session, _can_share(session, loader))
    if current.sharded:
        session.began = session.began or "a data loader was shared out"
    if session.distributed and (current.sharded or current.training or session.plan.evaluation == "gathered"):
        synchronise(session, loader)
    if current.training:
        if session.distributed and not current.sharded and session.plan.batches != "whole":
            session.say_once(
                "a data loader with an IterableDataset or without batches is not shared out: every rank trains "
                "on all of it, which is right but not faster"
            )
        current.steps = _steps(loader)
    return current


def _made(session: Session) -> Any:
    original = vars(_BaseDataLoaderIter)["__init__"]

    def init(self: Any, loader: DataLoader[Any]) -> None:
        if not session.live:
            original(self, loader)
            return
        current = session.starting = _begin(session, loader)
        self.__dict__[_PASS] = current
        try:
            original(self, loader)
        finally:
            session.starting = None
        if current.training and current.sharded:
            # Workers of different ranks augment differently. They start after this.
            self._base_seed = derived(self._base_seed, session.rank)

    return init


def _begun_again(session: Session) -> Any:
    original = vars(_BaseDataLoaderIter)["_reset"]

    def reset(self: Any, loader: DataLoader[Any], first_iter: bool = False) -> None:
        current = self.__dict__.get(_PASS)
        if current is None or not session.live:
            original(self, loader, first_iter)
            return
        if not first_iter:
            session.ended(current)
            current = self.__dict__[_PASS] = _begin(session, loader)
        if current.sharded:
            self._in_order = True  # shares are matched to batches by their order
        session.starting = current
        try:
            original(self, loader, first_iter)
        finally:
            session.starting = None

    return reset


def _yielding(session: Session) -> Any:
    original = vars(_BaseDataLoaderIter)["__next__"]

    def following(self: Any) -> Any:
        current = self.__dict__.get(_PASS)
        if current is None or not session.live:
            return original(self)
        session.boundary()
        try:
            data = original(self)
        except StopIteration:
            session.ended(current)
            raise
        except Exception:
            if current.shares:
                current.shares.popleft()
            raise
        if session.device.type == "cuda":
            data = moved(data, session.device)
        if current.training:
            share = current.shares.popleft() if current.sharded else None
            if share is not None:
                session.remember(data, share)
            session.yielded(current, share, num_samples(data) if share is None else share.num_mine)
        else:
            session.evaluating(current)
        return data

    return following


def _fetching(session: Session, streams: OwnStreams) -> Any:
    original = vars(_SingleProcessDataLoaderIter)["__init__"]

    def patched_init(self: Any, loader: DataLoader[Any]) -> None:
        original(self, loader)
        current = self.__dict__.get(_PASS)
        if (
            session.live
            and current is not None
            and current.training
            and current.sharded
            and not _is_plain(loader.dataset)
        ):
            self._dataset_fetcher = _Fetcher(self._dataset_fetcher, streams)

    return patched_init


class _Fetcher:
    """A loader's fetcher, drawing from the rank's own random numbers."""

    def __init__(self, fetcher: Any, streams: OwnStreams) -> None:
        self._fetcher = fetcher
        self._streams = streams

    def fetch(self, index: Any) -> Any:
        with self._streams.in_fetch():
            return self._fetcher.fetch(index)


def _is_plain(dataset: object) -> bool:
    """Whether fetching from ``dataset`` certainly draws no random numbers."""
    if type(dataset) is Subset:
        return _is_plain(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_is_plain(part) for part in dataset.datasets)
    return type(dataset) in (TensorDataset, list)


def _steps(loader: DataLoader[Any]) -> int | None:
    try:
        # An IterableDataset remembers that its length was asked for.
        return len(loader) if loader._dataset_kind == _DatasetKind.Map else None
    except Exception:  # a user's sampler may have no length, or fail to tell it
        return None


def num_samples(data: Any) -> int:
    """Rows of the first tensor in ``data``; 1 where there is none."""
    if isinstance(data, torch.Tensor):
        return len(data) if data.dim() else 1
    if isinstance(data, dict):
        data = list(data.values())
    return num_samples(data[0]) if isinstance(data, (list, tuple)) and data else 1
