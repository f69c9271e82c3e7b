"""``lagom.run_state.batch_origin``: the batch that a tensor comes from, for as long as the tensor lives."""

from __future__ import annotations

import threading

import pytest
import torch

from lagom.errors import LagomError
from lagom.run_state.batch_origin import BatchTracker
from lagom.run_state.loader_pass import BatchShare


def test_batches_that_are_kept_are_known_and_those_that_are_gone_are_dropped() -> None:
    provenance, kept = BatchTracker(2), []
    for step in range(1, 5001):
        batch = [torch.zeros(3, 2), torch.zeros(3)]
        provenance.remember(batch, BatchShare(3, 6, True, step))
        if step % 10 == 0:
            kept.append((step, batch))
    assert len(kept) == 500
    for step, batch in kept:
        for data in (batch, batch[0], batch[1].view(1, 3), {"x": (batch[1],)}):
            share = provenance.share(data)
            assert share is not None
            assert share.step == step
    assert len(provenance._shares) <= 2 * 2 * len(kept) + 256
    assert provenance.share(torch.zeros(3, 2)) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_a_batch_are_known() -> None:
    tracker, share, tail = BatchTracker(2), BatchShare(3, 6, True, 1), BatchShare(1, 3, False, 2)
    for one in (share, tail):
        batch = torch.nested.nested_tensor([torch.zeros(length, 2) for length in range(1, one.num_mine + 1)])
        tracker.batch(one)
        tracker.remember({"x": batch}, one)
        assert tracker.share(batch) is one
        assert tracker.share(batch.clone()) is None
        tracker.check_rows(batch.clone(), one)
    with pytest.raises(LagomError, match="called with 1 rows"):
        tracker.check_rows(batch, share)


class Looked(torch.Tensor):
    """Another thread remembers a batch while the tracker looks whether this tensor is alive."""

    def _fix_weakref(self) -> None:
        if not OTHERS:
            thread = threading.Thread(target=remember_other)
            thread.start()
            thread.join()


TRACKER = BatchTracker(2)
OTHERS: list[torch.Tensor] = []


def remember_other() -> None:
    OTHERS.append(torch.zeros(3, 2))
    TRACKER.remember(OTHERS, BatchShare(3, 6, True, 1))


def test_a_batch_that_another_thread_reads_meanwhile_is_known() -> None:
    kept = [torch.zeros(3, 2).as_subclass(Looked) for _ in range(300)]
    for tensor in kept:
        TRACKER.remember(tensor, BatchShare(3, 6, True, 2))
    assert [share.step for one in (OTHERS, kept) if (share := TRACKER.share(one))] == [1, 2]
