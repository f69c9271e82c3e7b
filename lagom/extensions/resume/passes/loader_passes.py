"""``LoaderPasses``: the passes of a program over its loaders, of which a snapshot has the positions."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.data.dataloader import _DatasetKind

from lagom.batches.sample_digest import digest
from lagom.errors import LagomError, SnapshotError
from lagom.extensions.resume.passes.loader_positions import (
    FIRST_BATCH,
    LAST_BATCH,
    LOADER,
    MADE,
    PASS_START,
    begin_iterators,
    pass_start,
)
from lagom.extensions.resume.passes.worker_positions import NOTES, USED, note_workers, used_by_workers

if TYPE_CHECKING:
    from lagom.session.session import Session


class LoaderPasses:
    """Notes with each iterator of a loader what a snapshot needs to begin it again."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def begin_pass(self, iterator: Any, loader: Any) -> None:
        """Note the states with which ``iterator`` begins a pass over ``loader``."""
        held = vars(iterator)
        # Workers end when loader and iterator are dropped. A loader with persistent workers holds its iterator, so the
        # iterator does not hold the loader.
        held[LOADER] = weakref.ref(loader) if loader.persistent_workers else lambda: loader
        held[PASS_START] = pass_start(loader)
        is_first = held.setdefault(MADE, held[PASS_START]) is held[PASS_START]
        if loader.num_workers and self.takes_notes:
            if is_first:
                held[USED] = used_by_workers(loader)
            elif (notes := note_workers(iterator)) is not None:
                notes.begin_pass(iterator)

    def take_batch(self, iterator: Any) -> None:
        """Note the random states before ``iterator`` takes its first batch, when its sampler draws the order.

        With workers the order was drawn before; then notes of the workers begin here, on rank 0.
        """
        if iterator._num_yielded:
            return
        if not iterator._num_workers:
            vars(iterator)[FIRST_BATCH] = pass_start(vars(iterator)[LOADER]())
        elif self.takes_notes:
            note_workers(iterator)

    def end_pass(self, iterator: Any) -> None:
        """Note the states of persistent workers after a pass."""
        if iterator._persistent_workers and NOTES in vars(iterator):
            vars(iterator)[NOTES].end_pass(iterator)

    def gave_batch(self, iterator: Any, data: Any, known: bytes) -> None:
        """Keep the digest of the last batch that ``iterator`` has given, if the data set is iterable.

        Not later, for a snapshot: the program may change the batch in place.

        Args:
            known: the digest of ``data``, if it has been computed; else empty.
        """
        if iterator._dataset_kind == _DatasetKind.Iterable and self.takes_notes:
            vars(iterator)[LAST_BATCH] = known or digest(data)

    @property
    def takes_notes(self) -> bool:
        """Whether this rank takes notes of workers."""
        return self._session.rank == 0

    def agree(self, mine: bool) -> bool:
        """Return on all ranks whether all give True; a collective."""
        if self._session.world_size == 1:
            return mine
        assert self._session.group is not None
        return all(row == b"1" for row in self._session.group.all_gather_bytes(b"1" if mine else b"0"))

    def made_batch(self) -> None:
        """Count a tick, since the rank makes progress."""
        self._session.progress.ticks += 1

    def restore(self, progress: Any) -> None:
        """Begin the passes of a snapshot again; called when the program's objects are restored, which workers then get.

        Raises:
            SnapshotError: if a loader cannot go on, or gives other batches than before.
        """
        try:
            passes = begin_iterators(self)
        except LagomError:
            raise
        except Exception as error:
            raise SnapshotError(f"a loader cannot go on: {type(error).__name__}: {error}") from error
        self._session.passes.restore(progress, passes)
