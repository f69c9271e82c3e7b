"""``patched``: patches torch for a run, so that an unmodified program runs on several ranks."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from lagom.accelerators import is_accelerator
from lagom.batches.dataloader import shard_loaders
from lagom.disk.install import is_protected, knows_rank
from lagom.disk.saving import patch_saves_and_downloads
from lagom.distributed.init_process_group import own_init_process_group
from lagom.distributed.mp_spawn import own_mp_spawn
from lagom.errors import LagomError
from lagom.extensions.registry import wanted
from lagom.forward.batchnorm import synchronise_batchnorm
from lagom.forward.module import patch_reentrant_checkpoints, prepare_forwards, track_modules
from lagom.forward.rows.one_hot import read_no_classes
from lagom.forward.rows.row_losses import share_losses
from lagom.forward.rows.slicer import watch_packing
from lagom.gradients.backward import synchronise_backward
from lagom.optimizers.step_ranges import skip_profiler_ranges, timed_steps
from lagom.patching.object_reference import swappable_tensors
from lagom.run_state.random_streams import OwnStreams, equal_fresh_seeds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from lagom.forward.precision import Precision
    from lagom.session.session import Session

__all__ = ["patched"]


@contextmanager
def patched(session: Session) -> Iterator[None]:
    """Patch torch for the program of ``session``, and enter the extensions of its run; undo all at the end.

    A module for a setting that a plain config leaves off is imported where the setting is on.

    With one rank, the patches for several ranks are left out. Batches are still counted and, with an accelerator, moved
    to it, backwards are published, and settings such as ``mixed_precision`` and ``micro_batches`` still act.

    Raises:
        LagomError: at the end, if a pass that was split as training was an evaluation.
        DivergenceError: at the end, in the cases of ``DivergenceMonitor.check_end``.
    """
    distributed = session.world_size > 1
    streams = OwnStreams(session.config.seed, session.rank, session.device)
    with ExitStack() as stack:
        for extension in wanted(session.plan):
            stack.enter_context(extension.rank(session))
        if line := untried(torch.__version__):
            session.say_once(line)
        stack.enter_context(own_init_process_group(session))
        stack.enter_context(swappable_tensors())
        if (distributed or session.plan.rehearsal is not None) and not session.plan.already_distributed:
            stack.enter_context(equal_fresh_seeds(session, streams))
        on_device = is_accelerator(session.device)
        moves = on_device and not session.plan.names_gpu
        if not distributed and (moves or session.backwards.gradient_store.is_external):
            stack.enter_context(track_modules(session))
        if moves:
            stack.enter_context(_moved_to_device(session))
        precision = _scaled_precision(session, stack)
        if distributed:
            stack.enter_context(_patched_for_ranks(session))
        elif session.events.follows_backwards and not session.backwards.gradient_store.is_external:
            from lagom.gradients.backward_events import publish_backwards

            stack.enter_context(publish_backwards(session))
        if distributed or session.plan.rehearsal is not None or is_protected():
            stack.enter_context(patch_saves_and_downloads(session))
        if distributed or on_device or session.config.micro_batches is not None or session.spans is not None:
            stack.enter_context(prepare_forwards(session, streams))
        if precision is not None:
            stack.enter_context(precision.autocast_forwards())
        stack.enter_context(shard_loaders(session, streams))
        stack.enter_context(timed_steps(session.clock))
        if (are_patched := session.events.patched.call) is not None:
            are_patched(stack)
        yield
        if (returned := session.events.returned.call) is not None:
            returned()
        _check_end(session)


def _scaled_precision(session: Session, stack: ExitStack) -> Precision | None:
    """Enter the patches of ``mixed_precision`` that come before those of gradients; return None without the setting."""
    if not (asked := session.config.mixed_precision):
        return None
    from lagom.forward.precision import Precision

    precision = Precision(session, asked)
    stack.enter_context(precision.scale_backwards())
    stack.enter_context(precision.convert_outputs())
    if session.world_size == 1:
        stack.enter_context(patch_reentrant_checkpoints(session))
    return precision


def _moved_to_device(session: Session) -> AbstractContextManager[None]:
    """Return a context in which tensors of programs that name no device meet on the rank's device."""
    from lagom.run_state.mixed_devices import meet_on

    return meet_on(
        session.device,
        session.tensors.modules.finished_modules,
        lambda: session.live and not session.is_in_thread,
    )


def _check_end(session: Session) -> None:
    """Check that all ranks are at the end; a collective, unless the program is distributed by itself."""
    backwards = session.backwards
    if backwards.divergence is not None and backwards.agreement is not None and not session.has_joined:
        session.evaluation_passes.judge(at_end=True)
        backwards.divergence.check_end(backwards.agreement)


def _refuse_known_rank() -> Sequence[tuple[None, None]]:
    if knows_rank():
        raise LagomError("the program has asked for its rank, so ranks may hold values of their own")
    return []


@contextmanager
def _patched_for_ranks(session: Session) -> Iterator[None]:
    """Patch functions in which several ranks cooperate: backward, optimizers, losses, BatchNorm, ``mp.spawn``."""
    with ExitStack() as stack:
        stack.enter_context(own_mp_spawn(session))
        stack.enter_context(track_modules(session))
        if not session.plan.already_distributed:
            from lagom.optimizers.fused_adam import fused_adam

            forwards, is_whole = session.forwards, session.config.batches == "whole"
            # With whole batches gradients have the bits of one process until a forward is split.
            stack.enter_context(fused_adam(lambda: forwards.has_sliced or not is_whole))
            session.resumption.learned["sliced"] = forwards.sliced_state, forwards.restore_sliced
        if not session.backwards.gradient_store.is_external:
            stack.enter_context(synchronise_backward(session, knows_rank))
            session.resumption.learned["rank"] = _refuse_known_rank, lambda _: None
            stack.enter_context(skip_profiler_ranges())
            stack.enter_context(watch_packing(session))
            if session.config.batches == "whole":
                stack.enter_context(share_losses(session, knows_rank))
                stack.enter_context(read_no_classes(session))
        if session.config.lr_scaling is not None and not session.plan.already_distributed:
            from lagom.optimizers.lr_scaling import scale_learning_rates

            stack.enter_context(scale_learning_rates(session))
        if session.config.sync_batchnorm:
            stack.enter_context(synchronise_batchnorm(session))
        yield


OLDEST = (2, 6)
NEWEST = (2, 15)


def untried(version: str) -> str:
    """Return a line that says that lagom is not tested with ``version`` of torch; "" if it is."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return ""
    tried = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
    return (
        f"torch {version} is untried: lagom is tested with {tried}, and replaces functions of torch; "
        "verify=True shows whether this program's numbers are right"
    )
