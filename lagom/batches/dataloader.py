"""Patches of DataLoader and its iterators, which also act on loaders that were built before the patch or unpickled."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _SingleProcessDataLoaderIter

from lagom.accelerators import is_accelerator
from lagom.batches.batch_shares import RankIndexSampler, ResumableIndexSampler
from lagom.batches.batch_source import choose_batch_source
from lagom.batches.fetching import PASS, make_create_fetcher, make_iterator_init
from lagom.batches.iterable import GroupedBatchSampler, ShardedCollate, is_iterable
from lagom.batches.pass_starter import PassStarter, can_split, classify_pass
from lagom.batches.reading_threads import ReaderThreads
from lagom.batches.sampler_sync import has_state
from lagom.batches.self_sharded import RankCollate, shards_itself
from lagom.batches.sharing.worker_sharing import share_workers
from lagom.batches.sharing.worker_watch import LOADER
from lagom.disk.install import knows_rank
from lagom.patching.replace import replaced
from lagom.program.unreadable_data import unreadable
from lagom.run_state.batch_contents import count_samples
from lagom.run_state.loader_pass import FEWER_ROWS, BatchShare, LoaderPass, has_fewer_rows
from lagom.run_state.random_streams import DRAWING, OwnStreams, derive_seed
from lagom.watch.spans import COPY
from lagom.watch.step_clock import LOADING_PARTS, OUTSIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.session.session import Session

_BATCH_SOURCE = "_lagom_batch_source"


@contextmanager
def shard_loaders(session: Session, streams: OwnStreams) -> Iterator[None]:
    """Patch torch's loaders to yield whole batches or this rank's share; the session counts batches and samples.

    With one rank, batches stay whole.
    """
    loaders = PassStarter(session, streams)
    with ExitStack() as stack:
        stack.enter_context(replaced(_BaseDataLoaderIter, "__init__", _make_iterator_init(loaders)))
        stack.enter_context(replaced(_BaseDataLoaderIter, "_reset", _make_reset(loaders)))
        stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", _make_next(session, loaders.readers)))
        stack.enter_context(replaced(_SingleProcessDataLoaderIter, "__init__", make_iterator_init(session, streams)))
        stack.enter_context(replaced(DataLoader, "__init__", _make_loader_init(loaders)))
        if session.world_size > 1:
            index_sampler = property(_make_index_sampler(loaders))
            stack.enter_context(replaced(DataLoader, "_index_sampler", index_sampler))
            stack.enter_context(replaced(DataLoader, "__len__", _make_len(loaders)))
            stack.enter_context(replaced(threading, "excepthook", loaders.readers.make_excepthook()))
            fetcher = staticmethod(make_create_fetcher(session, streams))
            stack.enter_context(replaced(_DatasetKind, "create_fetcher", fetcher))
            if session.config.share_loading:
                stack.enter_context(share_workers(session, lambda iterator: vars(iterator).get(PASS), knows_rank))
        yield


def _make_index_sampler(loaders: PassStarter) -> Any:
    original = vars(DataLoader)["_index_sampler"].fget
    session = loaders.session

    def index_sampler(loader: DataLoader[Any]) -> Any:
        source = original(loader)
        if not session.distributed or shards_itself(loader.dataset):
            return source
        if is_iterable(loader) and not loader._auto_collation:
            return source
        # A weak reference, since a loader with persistent workers holds its iterator, which holds this sampler: a cycle
        # would keep workers alive after the program has dropped the loader and the iterator.
        ref, splits = weakref.ref(loader), can_split(session, loader)

        def group_size() -> int:
            return loaders.group_size(ref(), splits)

        if is_iterable(loader):
            return GroupedBatchSampler(source, group_size)
        drop_last = bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))
        kind = ResumableIndexSampler if has_state(source) else RankIndexSampler
        return kind(session, source, lambda: classify_pass(session, splits), group_size, drop_last=drop_last)

    return index_sampler


def _make_len(loaders: PassStarter) -> Any:
    original = vars(DataLoader)["__len__"]

    def length(loader: DataLoader[Any]) -> int:
        found: int = original(loader)
        if not is_iterable(loader) or loader.batch_size is None:
            return found
        group_size = loaders.group_size(loader, can_split(loaders.session, loader))
        count, size = loader._IterableDataset_len_called, loader.batch_size * group_size
        if group_size == 1 or count is None:
            return found
        return count // size if loader.drop_last else -(-count // size)

    return length


def _make_loader_init(loaders: PassStarter) -> Any:
    original = vars(DataLoader)["__init__"]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        if type(loader).__iter__ is DataLoader.__iter__:  # not for subclasses that iterate in their own way
            with contextlib.suppress(TypeError):  # torch says which argument is wrong
                given = signature.bind(loader, *args, **kwargs).arguments
                if (text := unreadable(given["dataset"], given)) is not None:
                    raise ValueError(f"the data set of a DataLoader is {text}")
        original(loader, *args, **kwargs)
        if loaders.session.world_size > 1 and loaders.session.may_meet:
            loaders.names.number_loader(loader)

    return init


def _make_iterator_init(loaders: PassStarter) -> Any:
    original = vars(_BaseDataLoaderIter)["__init__"]
    session = loaders.session

    def begin(self: Any, loader: DataLoader[Any]) -> LoaderPass:
        current = session.starting_pass = loaders.begin(loader)
        self.__dict__[PASS] = current
        self.__dict__[_BATCH_SOURCE] = choose_batch_source(session, loader, current)
        generator = loader.generator or current.generator
        try:
            with ExitStack() as stack:
                if session.is_in_thread:
                    stack.enter_context(DRAWING)
                if (begun := session.events.pass_begun.call) is not None:
                    begun(self, loader)
                if generator is not loader.generator:
                    stack.enter_context(replaced(loader, "generator", generator))
                original(self, loader)
        finally:
            session.starting_pass = None
        if session.is_in_thread and current.published is not None:
            self._base_seed = int(current.published.agree(str(self._base_seed).encode()))
        return current

    def init(self: Any, loader: DataLoader[Any]) -> None:
        if not session.live:
            original(self, loader)
            return
        sys.audit(LOADER)
        session.reads_in_threads = session.reads_in_threads or session.is_in_thread
        current = loaders.readers.read(begin, self, loader) if session.is_in_thread else begin(self, loader)
        if not session.distributed:
            return
        if shards_itself(loader.dataset):
            self._collate_fn = RankCollate(session, self._collate_fn)
            self._base_seed = derive_seed(self._base_seed, session.rank)
        elif is_iterable(loader):
            shares_later = loader.persistent_workers and _may_share(session)
            if can_split(session, loader) and (current.is_split or shares_later):
                self._collate_fn = ShardedCollate(session, loader, loaders.streams)
                self._collate_fn.begin(current, session.config.batches)
        elif current.training and current.is_split:
            # Each rank gets its own base seed, so that the workers of different ranks draw different augmentations.
            # torch starts the workers after this ``__init__``, which is the base class's.
            self._base_seed = derive_seed(self._base_seed, session.rank)

    return init


def _may_share(session: Session) -> bool:
    return session.config.batches != "whole" or session.config.evaluation == "sharded"


def _make_reset(loaders: PassStarter) -> Any:
    original = vars(_BaseDataLoaderIter)["_reset"]
    session = loaders.session

    def reset(self: Any, loader: DataLoader[Any], first_iter: bool = False) -> None:
        current = self.__dict__.get(PASS)
        if current is None or not session.live:
            original(self, loader, first_iter)
            return
        if not first_iter:
            session.end_pass(current)
            is_shared = current.loading == "shared"  # the iterator keeps its workers
            current = self.__dict__[PASS] = loaders.begin(loader)
            current.loading = "shared" if is_shared else current.loading
            self.__dict__[_BATCH_SOURCE] = choose_batch_source(session, loader, current)
            if (begun := session.events.pass_begun.call) is not None:
                begun(self, loader)
            if isinstance(self._collate_fn, ShardedCollate):
                self._collate_fn.begin(current, session.config.batches)
        if current.is_split:
            self._in_order = True  # shares are matched to batches by their order
        session.starting_pass = current
        try:
            original(self, loader, first_iter)
        finally:
            session.starting_pass = None

    return reset


def _make_next(session: Session, readers: ReaderThreads) -> Any:
    original = vars(_BaseDataLoaderIter)["__next__"]
    moved = _mover(session) if is_accelerator(session.device) else None
    clock, is_alone = session.clock, session.world_size == 1

    def next_batch(self: Any) -> Any:
        held = self.__dict__
        current = held.get(PASS)
        if current is None or not session.live:
            return original(self)
        if (asked := session.events.batch_asked.call) is not None:
            asked(self)
        session.reseed_uneven()
        if current.failed and session.may_meet:
            current.failed = False
            session.check_place(_AFTER_FAILURE)
        received = held.get("_rcvd_idx")
        start = clock.ask(LOADING_PARTS[current.loading] if current.training else OUTSIDE)
        try:
            take = held[_BATCH_SOURCE].take
            session.reads_in_threads = session.reads_in_threads or session.is_in_thread
            data, share = readers.read(take, original, self) if session.is_in_thread else take(original, self)
        except StopIteration:
            clock.ask(OUTSIDE)
            _end_pass(session, current, self)
            raise
        except Exception:
            # The batch is lost, unless the wait for the workers failed, as by a timeout: then the batch may still come.
            if received is None or self._rcvd_idx != received:
                current.failed = current.training
                if current.shares:
                    current.shares.popleft()
            raise
        session.progress.data_s += clock.give(counts=is_alone and current.training) - start
        if (given := session.events.batch_given.call) is not None:
            given(self, data, getattr(held[_BATCH_SOURCE], "last_digest", b""))
        if moved is not None:
            data = moved(data, session.device)
        if current.training:
            _record_batch(session, current, data, share)
        else:
            session.record_evaluation(current)
        return data

    return next_batch


def _end_pass(session: Session, current: LoaderPass, iterator: Any) -> None:
    session.end_pass(current)
    if (exhausted := session.events.pass_exhausted.call) is not None:
        exhausted(iterator)
    if session.may_meet:
        session.evaluation_passes.end_pass(current)


def _record_batch(session: Session, current: LoaderPass, data: Any, share: BatchShare | None) -> None:
    """Record a batch of a training pass, and this rank's share of it."""
    if share is not None:
        if not current.own:
            share.step = current.step + 1
        if not torch.is_grad_enabled():
            session.say_once(_GRADIENTS_OFF)
        session.tensors.batch_tracker.remember(data, share)
        share.num_rows = 0 if data is None else count_samples(data)
        if share.num_rows < share.num_mine and has_fewer_rows(data, share):
            session.say_once(FEWER_ROWS)
    session.record_batch(current, share, count_samples(data) if share is None else share.num_mine)


def _mover(session: Session) -> Callable[[Any, torch.device], Any]:
    from lagom.run_state.device_moves import move_to_device  # for ranks with an accelerator only

    return move_to_device if session.spans is None else session.spans.timed(COPY, "to the device", move_to_device)


_AFTER_FAILURE = (
    'the batch after one that could not be loaded (with batches="whole" every rank loads every sample, so that all '
    "ranks find the same ones broken)"
)


_GRADIENTS_OFF = (
    "an iteration over a data loader that began with gradients on goes on with gradients off: it still gives each rank "
    "its share of the batches; begin it (call iter()) under torch.no_grad() if it is an evaluation"
)
