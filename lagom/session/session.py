"""``Session``: the state of a run that the patches share."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from lagom.batches.evaluation_passes import EvaluationPassDetector
from lagom.exchange.run_store import SealedStore
from lagom.run_state.leaves import Likeness
from lagom.run_state.loader_pass import NOT_SHARED, BatchShare, LoaderPass, PassTracker
from lagom.run_state.loss_terms import LossTermWeights, find_caveats
from lagom.run_state.random_streams import CommonStreams
from lagom.session.events import Events
from lagom.session.run_progress import RunProgress
from lagom.session.state_groups import BackwardState, ForwardState, KnownTensors, Resumption
from lagom.watch.step_clock import StepClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch._C._distributed_c10d import Store

    from lagom.config import TorchDistributedConfig
    from lagom.exchange.group import Group
    from lagom.exchange.native import Communicator
    from lagom.on_rank.rank_call import RankCall
    from lagom.plan import Plan
    from lagom.watch.spans import Spans

log = logging.getLogger("lagom")

_EXAMINED_LOSSES = frozenset(2**i for i in range(10))
"""Numbers of the backwards whose loss is examined for whether the average over shares is exact."""
_NUM_UNTIL_KNOWN = 4
"""Number of backwards after which it is known whether batches come from loaders, and whether forwards are split."""


@dataclass(eq=False, kw_only=True)
class Session:
    """The state of one run on one rank, shared by all patches."""

    plan: Plan
    group: Group | None
    """Exchanges between all ranks; None with a single rank."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    host_dir: Path
    """Directory that the ranks of this host share during the run."""
    store: Store | None
    """A torch Store that all ranks reach, for torch's own use; None with a single rank."""
    key: bytes = field(default=b"", repr=False)
    """Secret of the run, by which its ranks recognise each other; empty in an inline run."""
    spans: Spans | None = None
    """Record of the program's activities; None without a timeline."""

    device_facts: dict[str, Any] = field(default_factory=dict, init=False)
    """Models of the ranks' accelerators and what carries their tensors, for the run's records; empty on CPUs."""
    events: Events = field(default_factory=Events, init=False)
    """Moments at which extensions take part in the run."""
    parts: dict[str, Any] = field(default_factory=dict, init=False)
    """What extensions keep for this rank, by the name of the extension."""
    rank_call: RankCall | None = field(default=None, init=False)
    """The rank's process, with its connection to the driver; None in an inline run."""
    seed_text: str = field(default="", init=False)
    """Text that distinguishes this run's fresh seeds from those of other runs of the same processes."""
    _live: bool = field(default=True, init=False)
    typing_thread: int | None = field(default=None, init=False)
    """Id of the thread that is at a debugger's prompt; None without a prompt."""
    is_unpacked: bool = field(default=False, init=False)
    """Whether the call is unpickled, so that the program itself creates all further modules and loaders."""
    has_joined: bool = field(default=False, init=False)
    """Whether the program has called ``init_process_group``: it then exchanges by itself, and patches stay off."""
    distributed_part: str = field(default="", init=False)
    """Description of the first part of the program that lagom distributed, for an error; "" if none."""
    position: int | None = field(default=None, init=False)
    """Number, in its pass, of the batch with which a model was last called; None if it may differ between ranks."""
    common_streams: CommonStreams = field(init=False)
    """Random number streams that are equal on all ranks."""
    progress: RunProgress = field(init=False)
    """How far the program is; the heartbeat reports it."""
    clock: StepClock = field(default_factory=StepClock, init=False)
    """Seconds of the training steps by part."""
    forwards: ForwardState = field(init=False)
    """Forwards that run now or were split before."""
    tensors: KnownTensors = field(init=False)
    """Modules and tensors of the program that the run knows."""
    backwards: BackwardState = field(init=False)
    """How gradients are averaged, and where they are."""
    resumption: Resumption = field(default_factory=Resumption, init=False)
    """What another process needs that continues the run."""
    passes: PassTracker = field(default_factory=PassTracker, init=False)
    evaluation_passes: EvaluationPassDetector = field(init=False)
    """Detector of passes that were split because they seemed to be training."""
    _thread_local: threading.local = field(default_factory=threading.local, init=False)
    fail: Callable[[BaseException], None] | None = field(default=None, init=False)
    """Ends the run with an error of a thread other than the main thread; None in an inline run."""
    notes: SealedStore | None = field(default=None, init=False)
    """Store for texts that ranks leave for each other without a collective; None with a single rank."""
    reads_in_threads: bool = field(default=False, init=False)
    """Whether a thread other than the main one has read a loader: the global generators may advance at any moment."""
    _thread: int = field(default_factory=threading.get_ident, init=False)
    said: set[str] = field(default_factory=set, init=False)
    """Texts that ``say_once`` has logged."""
    _num_losses: int = field(default=0, init=False)
    has_other_order: bool = field(default=False, init=False)
    """Whether a sampler of this rank would have drawn another order than rank 0's; False again after the warning."""

    def __post_init__(self) -> None:
        if self.store is not None:
            on_one_host = self.local_world_size == self.world_size
            self.notes = SealedStore(self.store, self.key, self.host_dir if on_one_host else None)
        self.common_streams = CommonStreams(self.config.seed)
        self.progress = RunProgress(self.passes)
        self.tensors = KnownTensors.of_run(self.world_size, self.say_once)
        self.forwards = ForwardState.of_run(self.tensors, self.say_once)
        self.evaluation_passes = EvaluationPassDetector(self.tensors.batch_tracker.share, self.say_once)
        self.backwards = BackwardState(LossTermWeights(self.world_size, self.say_once))
        if self.group is not None:
            self.group.spans, self.group.clock = self.spans, self.clock
            self.backwards.exchange_by(self.group, self.tensors, self.likeness, self.config, self.device)
        _sessions.add(self)

    @property
    def config(self) -> TorchDistributedConfig:
        """The settings of the run."""
        return self.plan.config

    @property
    def live(self) -> bool:
        """Whether patches act: not once ``has_joined``, in forked processes, or for a thread at a debugger's prompt."""
        return self._live and (self.typing_thread is None or self.typing_thread != threading.get_ident())

    @live.setter
    def live(self, value: bool) -> None:
        self._live = value

    @property
    def distributed(self) -> bool:
        """Whether there are other ranks and patches act in this process."""
        return self.live and self.world_size > 1

    @property
    def starting_pass(self) -> LoaderPass | None:
        """The pass whose iterator this thread is making; None otherwise."""
        return getattr(self._thread_local, "current", None)

    @starting_pass.setter
    def starting_pass(self, current: LoaderPass | None) -> None:
        self._thread_local.current = current

    @property
    def may_meet(self) -> bool:
        """Whether this thread may exchange data with other ranks: there are other ranks, and it is the main thread.

        Exchanges of two threads could come in a different order on each rank, so that different ones would match.
        """
        return self.distributed and threading.get_ident() == self._thread

    @property
    def is_in_thread(self) -> bool:
        """Whether there are other ranks and this thread must not exchange data with them."""
        return self.distributed and not self.may_meet

    def check_place(self, place: str) -> None:
        """Check that all ranks are at ``place`` of the program; else raise a DivergenceError on all; a collective."""
        if self.backwards.divergence is not None and self.backwards.agreement is not None:
            self.backwards.divergence.check_place(self.backwards.agreement, place)

    def record_batch(self, current: LoaderPass, share: BatchShare | None, num_samples: int) -> None:
        """Record a training batch; ``share`` is the current share until the next batch or the end of the pass."""
        self.progress.ticks += 1
        self.passes.record_batch(current, share)
        self.tensors.batch_tracker.batch(share)
        self.evaluation_passes.record_batch(current, share, num_samples)
        self.progress.samples_trained += num_samples
        if share is not None and self.may_meet:
            if not share.even:
                self.common_streams.note()
            assert self.backwards.divergence is not None
            assert self.backwards.agreement is not None
            self.backwards.divergence.count_batch(self.backwards.agreement)

    def end_pass(self, current: LoaderPass) -> None:
        """Record that the pass is exhausted, and reseed generators as ``reseed_uneven`` does."""
        self.passes.end_pass(current)
        self.reseed_uneven()
        if (ended := self.events.pass_ended.call) is not None:
            ended()

    def reseed_uneven(self) -> None:
        """Reseed generators from which ranks drew different amounts: a collective, unless all batches were even.

        Do nothing in a thread that must not exchange.
        """
        if self.may_meet and self.group is not None:
            self.common_streams.reseed_uneven(self.group, self.check_place)

    def record_evaluation(self, current: LoaderPass) -> None:
        """Record a batch of an evaluation pass."""
        self.progress.ticks += 1
        self.passes.record_evaluation(current)

    def record_backward(self) -> None:
        """Record that a backward ran, and tell extensions."""
        if (call := self.events.backward_ended.call) is not None:
            call()
        self.progress.ticks += 1
        if self.config.batches != "whole" and self.passes.by_mode() is not None and not self.passes.trains():
            self.say_once(
                "a loop over a data loader trains while the whole model is in eval mode: every rank trains on all of "
                "its batches, which is right but not faster; call model.train() before the loop",
                is_notice=True,
            )

    def find_share(self, data: Any) -> BatchShare | None:
        """Return the share of the batch from which a model's input ``data`` comes, and make it the current share.

        ``data`` comes from a batch if it is a tensor of the batch, a view of one, or the output of another model for
        the batch. If it comes from no known batch, return None.

        Raises:
            LagomError: if ``data`` comes from no known batch, and has as many rows as a batch with another weight.
        """
        self.progress.ticks += 1
        share = self.tensors.batch_tracker.share(data)
        if share is not None:
            self.passes.used, self.position = share, share.step
        else:
            self.tensors.batch_tracker.check_rows(data, self.passes.share)
        return share

    def begin_backward(self, roots: Sequence[Any], leaves: Sequence[torch.Tensor]) -> None:
        """Prepare a backward from ``roots``: record the loss, and tell weights from data among ``leaves``.

        Raises:
            DivergenceError: when a leaf was taken for the perturbation of a batch, and is trained with another batch.
            LagomError: when a leaf may be a weight or data.
        """
        self.record_loss(roots)
        self.tensors.plain_leaves.examine(roots, leaves, self.passes.share)

    def record_loss(self, roots: Sequence[Any]) -> None:
        """Record that a backward from ``roots`` is about to run, and warn where its loss cannot be averaged exactly."""
        self.evaluation_passes.record_backward(roots)
        self._num_losses += 1
        if self._num_losses in _EXAMINED_LOSSES and self.config.batches != "whole" and self.passes.share is not None:
            for caveat in find_caveats(roots):
                self.say_once(caveat)
        if self._num_losses == _NUM_UNTIL_KNOWN and not (self.passes.have_read or self.forwards.has_sliced):
            self.say_once(NOT_SHARED["whole" if self.config.batches == "whole" else "split"], is_notice=True)
        self.progress.loss = _detached_number(roots[0]) if len(roots) == 1 else None

    @property
    def share_in_forward(self) -> BatchShare | None:
        """This rank's share of the batch of a forward, if the other ranks run the same forward; else None.

        In an evaluation, ranks run the same forward only if it is split by rows. Otherwise each rank has whole batches,
        or ranks have different numbers of batches.
        """
        if self.forwards.sliced_forward is not None:
            return self.forwards.sliced_forward.share
        return self.passes.share if self.distributed and self.passes.evaluation() is None else None

    @property
    def weight(self) -> float:
        """Factor for the loss of a backward: this rank's share of the batch times the number of ranks."""
        share = self.passes.share
        return 1.0 if share is None else share.weight(self.world_size)

    def likeness(self, leaf: torch.Tensor) -> Likeness:
        """Return how closely ``leaf`` resembles this rank's share of a batch."""
        return self.tensors.plain_leaves.likeness(leaf, self.passes.share)

    def evaluates_by_mode(self) -> bool:
        """Return whether all trained modules are in eval mode."""
        return self.tensors.modules.in_eval_mode(
            self.tensors.leaves, self.backwards.divergence.reached if self.backwards.divergence is not None else set()
        )

    def wait_times(self) -> list[int]:
        """Return the nanoseconds that this rank has waited for each other rank; may be called from another thread."""
        if self.has_joined:
            return next((found for one in _whole_groups(self.world_size) if (found := one.waited())), [])
        return self.group.waited() if self.group is not None else []

    def waiting_exchange(self) -> tuple[str, int, list[int]]:
        """Return the exchange in which this rank waits ("" if none), the exchange's number, and the missing ranks."""
        if self.has_joined:
            return next((found for one in _whole_groups(self.world_size) if (found := one.standing())[0]), ("", 0, []))
        return self.group.standing() if self.group is not None else ("", 0, [])

    def say_once(self, text: str, *, is_notice: bool = False) -> None:
        """Log ``text`` unless it was logged before; in a notice nothing is wrong."""
        if text not in self.said:
            self.said.add(text)
            log.warning(text, extra={"is_notice": is_notice})


def _whole_groups(world_size: int) -> list[Communicator]:
    from lagom.exchange.torch_backend.shared_group import whole_groups  # distributed programs have imported it

    return whole_groups(world_size)


def _detached_number(loss: Any) -> torch.Tensor | None:
    """Return ``loss`` without its graph; None unless it is one number on the CPU, as a read of a GPU blocks."""
    if type(loss) is not torch.Tensor or not loss.is_cpu or not loss.is_floating_point() or loss.numel() != 1:
        return None
    # A view would keep the memory of all that it is a view of.
    return loss.detach() if loss._base is None else loss.detach().clone()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _disable_sessions() -> None:
    for session in list(_sessions):
        session.live = False


# Processes forked from a rank are not ranks: patches must not act on their backwards and saves.
os.register_at_fork(after_in_child=_disable_sessions)
