"""``truncated_passes``: cuts passes over data loaders to their first batches and their last, for a rehearsal."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader

from lagom.batches.iterable import is_iterable
from lagom.extensions.verify.on_rank.fixed_randomness import fixed_randomness
from lagom.extensions.verify.on_rank.jumping_clock import jumping_clocks
from lagom.extensions.verify.on_rank.record import RehearsalProgress
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.session.session import Session

_LONGEST = 1_000_000
"""Length of a sampler up to which its real last batch is found; else the next batch counts as the last."""


@contextmanager
def truncated_passes(session: Session) -> Iterator[None]:
    """End every pass over a loader after a few batches; to be entered before loaders are patched.

    If the rehearsal says so, also fix random numbers, and let clocks jump.
    """
    rehearsal = session.plan.rehearsal
    assert rehearsal is not None
    progress = session.parts["verify"] = RehearsalProgress(rehearsal.num_before)
    original = vars(DataLoader)["_index_sampler"].fget

    def num_batches() -> int:
        is_short = progress.num_backwards >= rehearsal.num_in_long_passes
        return rehearsal.num_batches_of_short if is_short else rehearsal.num_batches

    def index_sampler(loader: DataLoader[Any]) -> Any:
        source = original(loader)
        if not session.live:
            return source
        if is_iterable(loader) and isinstance(source, BatchSampler):
            # An iterable data set gets indices that are all None: only their number counts. The result has to be a
            # BatchSampler, since GroupedBatchSampler reads its attributes.
            joined = source.batch_size * (rehearsal.group_size if session.world_size == 1 else 1)
            size = source.batch_size * rehearsal.group_size
            nones = _Nones(lambda: size * num_batches())
            return BatchSampler(nones, joined, source.drop_last)  # type: ignore[arg-type]
        return _Cut(source, num_batches, rehearsal.group_size, session.world_size)

    with ExitStack() as stack:
        stack.enter_context(replaced(DataLoader, "_index_sampler", property(index_sampler)))
        if rehearsal.pinned:
            stack.enter_context(fixed_randomness(session))
        if rehearsal.jumps:
            stack.enter_context(jumping_clocks())
        yield


class _Nones:
    """Stands for the sampler of an iterable data set, whose indices are all None."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count

    def __iter__(self) -> Iterator[None]:
        return iter([None] * self._count())


class _Cut:
    """Stands for a loader's batch sampler, or sampler: yields only the first batches of the original and the last."""

    def __init__(self, source: Any, num_batches: Callable[[], int], group_size: int, world_size: int) -> None:
        self._source = source
        self._num_batches = num_batches
        self._group = group_size
        # One process stands for all ranks, so it receives the batches of a group, one for each rank, as one batch.
        self._joins = group_size > 1 and world_size == 1

    def __len__(self) -> int:
        groups = min(-(-len(self._source) // self._group), self._num_batches())
        return groups if self._joins else min(len(self._source), groups * self._group)

    def __iter__(self) -> Iterator[Any]:
        for group in self._groups():
            if self._joins and not isinstance(group[0], int):
                yield list(chain.from_iterable(group))
            else:
                yield from group

    def _groups(self) -> Iterator[list[Any]]:
        batches = iter(self._source)
        for _ in range(self._num_batches() - 1):
            group = list(islice(batches, self._group))
            if not group:
                return
            yield group
        try:
            known = len(self._source) <= _LONGEST
        except TypeError:
            known = False
        last = list(islice(batches, self._group))
        while known and (following := list(islice(batches, self._group))):
            last = following
        if last:
            yield last
