"""``PassStarter``: begin passes over loaders, and decide which are training and which are split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lagom.batches.iterable import is_iterable
from lagom.batches.reading_threads import PassNames, Publication, ReaderThreads
from lagom.batches.sampler_sync import synchronise_generators
from lagom.batches.self_sharded import shards_itself
from lagom.errors import LagomError
from lagom.patching.object_reference import ObjectReference
from lagom.run_state.loader_pass import LoaderPass

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from lagom.run_state.random_streams import OwnStreams
    from lagom.session.session import Session


class PassStarter:
    """Begins passes over loaders, and remembers the kinds of earlier passes."""

    def __init__(self, session: Session, streams: OwnStreams) -> None:
        self.session = session
        self.streams = streams
        self.names = PassNames()
        self.readers = ReaderThreads(session)
        self._kinds = WeakIdKeyDictionary(ref_type=ObjectReference)

    def begin(self, loader: DataLoader[Any]) -> LoaderPass:
        """Begin a pass over ``loader``; in the main thread a collective, unless ranks need not follow the same order.

        Raises:
            LagomError: if the data set shards itself though batches are whole, if other ranks cannot tell this pass
                from that of another thread, or if an earlier pass turns out to be an evaluation.
            DivergenceError: on all ranks, if they are at different places of the program.
        """
        session = self.session
        session.reseed_uneven()  # the iterator draws from the common stream
        current = classify_pass(session, can_split(session, loader), loader)
        current.own = session.distributed and shards_itself(loader.dataset)
        if current.own and session.config.batches == "whole":
            raise LagomError(_OWN_IN_WHOLE)
        if current.own or (current.is_split and not is_iterable(loader)):
            current.loading = "divided"
        if current.training:
            session.progress.num_workers = loader.num_workers
        if current.is_split:
            session.distributed_part = session.distributed_part or "a data loader was shared out"
        gathered = session.config.evaluation == "gathered" and not current.own
        if session.distributed and (current.is_split or current.training or gathered):
            if session.may_meet:
                synchronise_generators(session, loader, own_order=current.own)
                name = self.names.name_in_main_thread()
            else:
                name = self.names.name_in_thread(loader, current)
            current.published, current.readers = Publication(session, name), self.readers
            current.generator = None if session.may_meet else self.readers.make_generator(current)
        self._kinds.setdefault(loader, set()).add(current.training and current.is_split)
        if session.may_meet and not session.backwards.gradient_store.is_external:
            is_split = current.training and current.is_split and session.config.evaluation != "sharded"
            session.evaluation_passes.begin_pass(loader, current, follows=is_split)
        if current.training:
            if session.distributed and not (current.is_split or current.own or session.config.batches == "whole"):
                session.say_once(_NO_BATCHES)
            current.steps = _num_steps(loader)
        return current

    def group_size(self, loader: DataLoader[Any] | None, can_split: bool) -> int:
        """Return how many of the loader's own batches make one batch of its next pass: above 1 only in ``per_rank``.

        While this thread makes the iterator of a pass, the next pass is that one. Else, if all earlier passes over the
        loader were of one kind (split for training, or not), the next pass is taken to be of that kind. Otherwise it is
        classified as a pass that begins now. So ``len(loader)`` fits the passes of the loader also after they have
        ended, with gradients on or off. ``loader`` is None if it has been dropped.
        """
        session = self.session
        if not session.distributed or session.config.batches != "per_rank":
            return 1
        kinds = self._kinds.get(loader, set()) if loader is not None else set()
        if session.starting_pass is None and len(kinds) == 1:
            return session.world_size if True in kinds else 1
        current = session.starting_pass or classify_pass(session, can_split)
        return session.world_size if current.training and current.is_split else 1


_OWN_IN_WHOLE = (
    'batches="whole" takes each batch to be the same on all ranks, but the data set of a loader shards itself '
    '(lagom_sharded); use batches="split" or "per_rank", or have it give all of its samples'
)
_NO_BATCHES = (
    "a data loader that makes no batches (batch_size=None) is not shared out: every rank trains on all of it, which is "
    'right but not faster; batches="whole" shares out what the model is called with'
)


def classify_pass(session: Session, can_split: bool, loader: DataLoader[Any] | None = None) -> LoaderPass:
    """Decide whether a pass over ``loader`` that begins now is training, and whether its batches are split.

    A pass that is split as training and turns out to be an evaluation is an error; see ``evaluation_passes.py``.

    Args:
        can_split: whether the loader's batches can be split, as ``can_split`` returns.
        loader: None if it is unknown; then its earlier passes are not considered.
    """
    grad = torch.is_grad_enabled()
    by_mode = grad and session.world_size > 1 and session.evaluates_by_mode()
    if (
        by_mode
        and loader is not None
        and session.config.batches != "whole"
        and session.evaluation_passes.expects_training(loader)
    ):
        by_mode = False
    training = grad and not by_mode
    splits = session.config.batches != "whole" if training else session.config.evaluation == "sharded"
    return LoaderPass(training=training, is_split=can_split and splits, by_mode=by_mode)


def can_split(session: Session, loader: DataLoader[Any]) -> bool:
    """Return whether the loader's batches can be split between ranks."""
    return session.distributed and loader._auto_collation and not shards_itself(loader.dataset)


def _num_steps(loader: DataLoader[Any]) -> int | None:
    """Return the number of batches of a loader, or None if ``len`` may have side effects, or fails.

    A loader of an iterable data set remembers that its length was asked for, and warns if it was wrong. A custom
    sampler may iterate over itself, and draw random numbers, to find its length.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = batch_sampler, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)
    lengths = [getattr(type(one), "__len__", None) for one in samplers if one is not None]
    if is_iterable(loader) or any(not _is_from_torch(length) for length in lengths):
        return None
    try:
        return len(loader)
    except Exception:  # a user's data set may have no length, or fail to compute it
        return None


def _is_from_torch(function: object) -> bool:
    return getattr(function, "__module__", "").startswith("torch.utils.data.")
