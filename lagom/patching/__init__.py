"""What makes an unmodified program run on several ranks: torch, patched for the time of a run."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from lagom.patching.backward import synchronised_backward
from lagom.patching.batchnorm import whole_batch_statistics
from lagom.patching.dataloader import dealt_loaders
from lagom.patching.engine import driven_by_deepspeed
from lagom.patching.events import events_once
from lagom.patching.files import shared_files
from lagom.patching.joined import joinable
from lagom.patching.module import own_forwards, reentrant_checkpoints, tracked_modules
from lagom.patching.optimizer import sharded_steps
from lagom.patching.own_ranks import spawned_ranks
from lagom.patching.precision import Precision
from lagom.patching.random import OwnStreams
from lagom.patching.rates import scaled_rates
from lagom.patching.stepping import quick_steps
from lagom.patching.timing import timed
from lagom.patching.tracking import tracked_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.patching.session import Session

__all__ = ["patched"]


@contextmanager
def patched(session: Session) -> Iterator[None]:
    """Patch torch for the program of ``session``; undone exactly, also when it raises.

    With one rank only batches are counted and, on CUDA, moved to the device.
    """
    distributed = session.world_size > 1
    streams = OwnStreams(session.plan.seed, session.rank, session.device)
    with ExitStack() as stack:
        stack.enter_context(joinable(session))
        asked = session.plan.mixed_precision
        precision = Precision(session, asked) if asked else None
        if precision is not None:
            stack.enter_context(precision.backwards())
            stack.enter_context(precision.outputs())
            if not distributed:
                stack.enter_context(reentrant_checkpoints(session))
        if distributed:
            stack.enter_context(spawned_ranks(session))
            end_tracking = stack.enter_context(tracked_once(session))
            stack.enter_context(events_once(session))
            stack.enter_context(tracked_modules(session))
            if session.plan.backend == "torch":
                stack.enter_context(synchronised_backward(session))
                stack.enter_context(quick_steps(session))
                if session.plan.zero_lvl:
                    stack.enter_context(sharded_steps(session))
            if session.plan.lr_scaling is not None and not session.plan.already_distributed:
                stack.enter_context(scaled_rates(session))
            if session.plan.sync_batchnorm:
                stack.enter_context(whole_batch_statistics(session))
        if distributed or session.plan.rehearsal is not None:
            stack.enter_context(shared_files(session))
        has_forwards = distributed or session.device.type == "cuda" or session.plan.micro_batches is not None
        if has_forwards:
            stack.enter_context(own_forwards(session, streams))
        if precision is not None:
            stack.enter_context(precision.forwards())
        if session.plan.backend == "deepspeed":
            if not distributed:
                stack.enter_context(tracked_modules(session))
            stack.enter_context(driven_by_deepspeed(session))
        stack.enter_context(dealt_loaders(session, streams))
        if session.spans is not None:
            stack.enter_context(timed(session, session.spans, forwards=has_forwards))
        yield
        if distributed:
            end_tracking()
        if session.watch is not None and session.frame is not None and not session.joined:
            session.dealt.judge(at_end=True)
            session.watch.end(session.frame)
