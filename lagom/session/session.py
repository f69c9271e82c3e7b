"""``Session``: what the patches know of a run."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lagom.collectives.agreement_exchange import FRAME, AgreedExchange
from lagom.collectives.run_store import SealedStore
from lagom.collectives.torch_backend.shared_group import whole_groups
from lagom.forward.running_values import RunningValueDetector
from lagom.gradients.criteria import caveats
from lagom.gradients.divergence import DivergenceMonitor
from lagom.gradients.reduction.mean import reduction
from lagom.gradients.replicate import Replicate
from lagom.loaders.evaluation_passes import EvaluationPassDetector
from lagom.run_state.batch_origin import BatchTracker
from lagom.run_state.leaves import Leaves, Likeness
from lagom.run_state.loader_pass import NOT_SHARED, BatchShare, LoaderPass, PassTracker
from lagom.run_state.loss_terms import LossTermWeights
from lagom.run_state.module_registry import ModuleRegistry
from lagom.run_state.random_streams import CommonStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch._C._distributed_c10d import Store

    from lagom.collectives.group import Group
    from lagom.monitor.spans import Spans
    from lagom.plan import Plan
    from lagom.row_split.probe import BatchStatistics
    from lagom.row_split.slicer import SlicedForward
    from lagom.zero.gradient_shards import GradientShards
    from lagom.zero.optimizer_group import OptimizerGroup
    from lagom.zero.parameters.shards import ParameterShards

log = logging.getLogger("lagom")

_LOOKED_AT = frozenset(2**i for i in range(10))
"""Backwards whose loss is looked at: whether the average over shares is exact."""
_SOME = 4
"""Backwards after which it is known how the program's batches come, and whether forwards are shared out."""


@dataclass(eq=False, kw_only=True)
class Session:
    """The state of one run on one rank, shared by all patches."""

    plan: Plan
    group: Group | None
    """The ranks; None when there is only one."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    host_dir: Path
    """A directory that the ranks of this host share during the run."""
    store: Store | None
    """A torch Store that all ranks reach, for what torch itself makes."""
    key: bytes = field(default=b"", repr=False)
    """What the ranks of this run know and nobody else does."""
    spans: Spans | None = None
    """Where what the program does is noted; None where no timeline is wanted."""

    live: bool = field(default=True, init=False)
    """False in processes forked from the rank, such as loader workers: patches do nothing there; and once joined."""
    has_arrived: bool = field(default=False, init=False)
    """What came with the program has been unpacked; from now on it is the program that makes things."""
    joined: bool = field(default=False, init=False)
    """The program has called ``init_process_group``: it is distributed by itself, and patches are off for good."""
    began: str = field(default="", init=False)
    """What of the program was distributed before that, in words."""
    samples_trained: int = field(default=0, init=False)
    num_rehearsed: int = field(default=0, init=False)
    """Backwards of a rehearsal so far."""
    ticks: int = field(default=0, init=False)
    """Of batches, forwards and backwards: as long as it grows, the program gets somewhere."""
    data_s: float = field(default=0.0, init=False)
    """For which the program has waited for batches."""
    _loss: weakref.ref[torch.Tensor] | None = field(default=None, init=False)
    reported: dict[str, float | int] = field(default_factory=dict, init=False)
    """What the program reported last; shown along with the progress."""
    pictures: deque[str] = field(default_factory=deque, init=False)
    """PNGs as base64, that the program has shown and the driver has not been told of."""
    position: int | None = field(default=None, init=False)
    """Which batch of its pass a model was called with last; None where ranks may be at different ones."""
    depth: int = field(default=0, init=False)
    """Of nested backwards; recomputed forwards must find the random numbers of the first time."""
    common: CommonStreams = field(init=False)
    """The random numbers that are equal on all ranks."""
    terms: LossTermWeights = field(init=False)
    """Of losses, and their weights."""
    passes: PassTracker = field(default_factory=PassTracker, init=False)
    dealt: EvaluationPassDetector = field(init=False)
    """Passes whose rows were dealt out because they seemed to be training."""
    running: RunningValueDetector = field(init=False)
    """What forwards keep of the rows that they are called with."""
    _starting: threading.local = field(default_factory=threading.local, init=False)
    modules: ModuleRegistry = field(default_factory=ModuleRegistry, init=False)
    leaves: Leaves = field(default_factory=Leaves, init=False)
    synchronised: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, init=False)
    """Buffers that are equal on all ranks because of what lagom does in the forward."""
    repeated: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary, init=False)
    """Inputs of forwards that a backward repeats: leaves whose gradients stay the rank's own."""
    provenance: BatchTracker = field(init=False)
    """Of tensors: which batches they come from."""
    region: SlicedForward | None = field(default=None, init=False)
    """The sliced forward under way."""
    probed: BatchStatistics | None = field(default=None, init=False)
    """Statistics for BatchNorm while a forward is only looked at."""
    frame: AgreedExchange | None = field(default=None, init=False)
    watch: DivergenceMonitor | None = field(default=None, init=False)
    replicate: Replicate | None = field(default=None, init=False)
    optimizers: OptimizerGroup | None = field(default=None, init=False)
    """With ``zero_lvl``."""
    gradients: GradientShards | None = field(default=None, init=False)
    """With ``zero_lvl=2``."""
    weights: ParameterShards | None = field(default=None, init=False)
    """With ``zero_lvl=3``."""
    fail: Callable[[BaseException], None] | None = field(default=None, init=False)
    """Ends the run with an error of another thread than the main one; None where nobody is to be told."""
    notes: SealedStore | None = field(default=None, init=False)
    """What ranks leave for each other, which is no collective."""
    reads_in_threads: bool = field(default=False, init=False)
    """A thread of the program's reads a loader: the global generators may move on at any moment."""
    _thread: int = field(default_factory=threading.get_ident, init=False)
    _said: set[str] = field(default_factory=set, init=False)
    _num_losses: int = field(default=0, init=False)
    draws_otherwise: bool = field(default=False, init=False)
    """A sampler of this rank would have drawn another order than rank 0's, whose order holds."""
    has_sliced: bool = field(default=False, init=False)
    """Ranks have shared out a forward by its rows."""
    is_probing: bool = field(default=False, init=False)
    num_micro_batches: int = field(default=1, init=False)
    """In which a forward has run, at most."""
    shares_forwards: bool = field(default=True, init=False)
    """False where a forward of blocks is not to be had: DeepSpeed's third stage gathers parameters by its own hooks."""

    def __post_init__(self) -> None:
        if self.store is not None:
            on_one_host = self.local_world_size == self.world_size
            self.notes = SealedStore(self.store, self.key, self.host_dir if on_one_host else None)
        self.common = CommonStreams(self.plan.seed)
        self.terms = LossTermWeights(self.world_size, self.say_once)
        self.provenance = BatchTracker(self.world_size, self.leaves)
        self.running = RunningValueDetector(self.synchronised, self.say_once)
        self.dealt = EvaluationPassDetector(self.provenance.share, self.say_once)
        if self.group is not None:
            self.frame = AgreedExchange(self.group, 0 if self.device.type == "cuda" else FRAME)
            self.watch = DivergenceMonitor(
                self.group, self.leaves, self.modules.made, self.synchronised, self.modules.name_of
            )
            reduced = reduction(self.group, self.plan.gradient_compression, self.plan.reduction == "adasum")
            self.replicate = Replicate(
                self.group, self.leaves, self.watch, self.frame, self.likeness, self.modules.name_of, reduced
            )
        _alive.add(self)

    @property
    def distributed(self) -> bool:
        """Whether there are other ranks, and this process is one of them."""
        return self.live and self.world_size > 1

    @property
    def starting(self) -> LoaderPass | None:
        """The pass whose iterator this thread is making."""
        return getattr(self._starting, "current", None)

    @starting.setter
    def starting(self, current: LoaderPass | None) -> None:
        self._starting.current = current

    @property
    def may_meet(self) -> bool:
        """Whether there are other ranks, and this thread may exchange anything with them: the program's main one."""
        return self.distributed and threading.get_ident() == self._thread

    @property
    def is_in_thread(self) -> bool:
        """Whether there are other ranks, and this is not the thread that may exchange anything with them."""
        return self.distributed and not self.may_meet

    def at(self, place: str) -> None:
        """Make sure that all ranks are at ``place`` of the program; a DivergenceError on all of them otherwise."""
        if self.watch is not None and self.frame is not None:
            self.watch.at(self.frame, place)

    def yielded(self, current: LoaderPass, share: BatchShare | None, num_samples: int) -> None:
        """The program sees a training batch; its share holds until another one's or the end of its pass."""
        self.ticks += 1
        self.passes.yielded(current, share)
        self.provenance.batch(share)
        self.dealt.yielded(current, share, num_samples)
        self.samples_trained += num_samples
        if share is not None and self.may_meet:
            if not share.even:
                self.common.note()
            assert self.watch is not None
            assert self.frame is not None
            self.watch.batch(self.frame)

    def ended(self, current: LoaderPass) -> None:
        """The pass is exhausted."""
        self.passes.ended(current)
        self.settle()

    def settle(self) -> None:
        """Have generators that ranks drew from unevenly be equal again, unless this is a thread of the program's."""
        if self.may_meet:
            self.common.settle()

    def evaluating(self, current: LoaderPass) -> None:
        """The program sees a batch of a pass that is evaluation."""
        self.ticks += 1
        self.passes.evaluating(current)

    def trained(self) -> None:
        """A backward ran."""
        self.ticks += 1
        if self.plan.batches != "whole" and self.passes.by_mode() is not None and not self.passes.trains():
            self.say_once(
                "a loop over a data loader trains while the whole model is in eval mode: every rank trains on all of "
                "its batches, which is right but not faster; call model.train() before the loop"
            )

    def uses(self, data: Any) -> BatchShare | None:
        """A model is called with ``data``: the share of the batch it comes from holds until another is seen.

        None where it is not known to come from one: not directly, as a view, or through another model.

        Raises:
            LagomError: when it has the rows of another batch, one with another weight.
        """
        self.ticks += 1
        found = self.provenance.share(data)
        if found is not None:
            self.passes.used, self.position = found, found.step
        else:
            self.provenance.check_rows(data, self.passes.share)
        return found

    def tell_weights(self, roots: Sequence[Any], leaves: Sequence[torch.Tensor]) -> None:
        """A backward from ``roots`` is about to reach ``leaves``: find those that only look like samples.

        Raises:
            DivergenceError: when one was taken for the perturbation of a batch, and is trained with another.
        """
        self.tell_loss(roots)
        self.provenance.tell_weights(roots, leaves, self.passes.share)

    def tell_loss(self, roots: Sequence[Any]) -> None:
        """A backward from ``roots`` is about to run."""
        self.dealt.backward(roots)
        self._num_losses += 1
        if self._num_losses in _LOOKED_AT and self.plan.batches != "whole" and self.passes.share is not None:
            for caveat in caveats(roots):
                self.say_once(caveat)
        if self._num_losses == _SOME and not (self.passes.have_read or self.has_sliced):
            self.say_once(NOT_SHARED["whole" if self.plan.batches == "whole" else "split"])
        # Not held, as its graph would be; a loop's variable keeps it for about as long as it is of interest.
        self._loss = weakref.ref(roots[0]) if len(roots) == 1 else None

    @contextmanager
    def probing(self) -> Iterator[None]:
        """While a forward is only looked at: nothing is exchanged."""
        self.is_probing = True
        try:
            yield
        finally:
            self.is_probing = False

    @contextmanager
    def statistics(self, probed: BatchStatistics) -> Iterator[None]:
        """Have BatchNorm use ``probed``."""
        self.probed = probed
        try:
            yield
        finally:
            self.probed = None

    @property
    def share_in_forward(self) -> BatchShare | None:
        """Of the batch that a forward sees, if the other ranks run it as well.

        They do not while they evaluate: every rank has whole batches, or the numbers of batches differ.
        """
        if self.region is not None:
            return self.region.share
        return self.passes.share if self.distributed and self.passes.evaluation() is None else None

    @property
    def weight(self) -> float:
        """What the root of a backward is multiplied by."""
        share = self.passes.share
        return 1.0 if share is None else share.weight(self.world_size)

    def likeness(self, leaf: torch.Tensor) -> Likeness:
        """How much ``leaf`` is like this rank's share of a batch, and not like something to be trained."""
        return self.provenance.likeness(leaf, self.passes.share)

    def evaluates_by_mode(self) -> bool:
        """Whether the modules that are trained are all in eval mode."""
        return self.modules.in_eval_mode(self.leaves, self.watch.reached if self.watch is not None else set())

    def progress(self) -> dict[str, int | float | None]:
        """Where training is, as plain numbers; may be called from another thread."""
        now = {**self.passes.progress, "samples": self.samples_trained, "ticks": self.ticks, "data_s": self.data_s}
        return {**now, "loss": self._last_loss(), **self.reported}

    def waited(self) -> list[int]:
        """Nanoseconds for which this rank has waited for each other; may be called from another thread."""
        if self.joined:
            return next((found for one in whole_groups(self.world_size) if (found := one.waited())), [])
        return self.group.waited() if self.group is not None else []

    def standing(self) -> tuple[str, int, list[int]]:
        """The exchange in which this rank waits, in words, its number, and who has not come; no words where none."""
        if self.joined:
            return next((found for one in whole_groups(self.world_size) if (found := one.standing())[0]), ("", 0, []))
        return self.group.standing() if self.group is not None else ("", 0, [])

    def _last_loss(self) -> float | None:
        """Of this rank's share, where it is a single number on the CPU: to read one off a GPU would have it wait."""
        loss = self._loss() if self._loss is not None else None
        if type(loss) is not torch.Tensor or loss.numel() != 1 or loss.device.type != "cpu":
            return None
        return float(loss.detach())

    def say_once(self, text: str) -> None:
        """Log ``text``, the first time."""
        if text not in self._said:
            self._said.add(text)
            log.warning(text)


_alive: weakref.WeakSet[Session] = weakref.WeakSet()


def _forget() -> None:
    for session in list(_alive):
        session.live = False


# Processes forked from a rank are not ranks: their backwards and saves are their own.
os.register_at_fork(after_in_child=_forget)
