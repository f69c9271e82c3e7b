"""``lagom.run_state.batch_origin``: the batch that a tensor comes from, for as long as the tensor lives."""

from __future__ import annotations

import torch

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
