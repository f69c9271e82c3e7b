"""Groups of the fields of a session: known tensors, forwards, backwards, and what a process needs that continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lagom.accelerators import is_accelerator
from lagom.exchange.agreement_exchange import FRAME, AgreedExchange
from lagom.forward.rows.whole_calls import WholeCalls
from lagom.forward.running_value_warnings import RunningValueDetector
from lagom.gradients.divergence import DivergenceMonitor
from lagom.gradients.gradient_averager import GradientAverager
from lagom.gradients.reduction.buckets import make_reduction
from lagom.gradients.tensor_stores import GradientStore, ParameterStore
from lagom.patching.object_reference import tensor_dictionary
from lagom.run_state.batch_origin import BatchTracker
from lagom.run_state.leaves import Leaves, PlainLeaves
from lagom.run_state.module_registry import ModuleRegistry

if TYPE_CHECKING:
    from lagom.config import TorchDistributedConfig
    from lagom.exchange.group import Group
    from lagom.forward.rows.recorder import BatchStatistics
    from lagom.forward.rows.sliced_forward import MicroBatch, SlicedForward
    from lagom.run_state.leaves import Likeness
    from lagom.run_state.loss_terms import LossTermWeights
    from lagom.run_state.state_shards import KeptParts, StateShards


@dataclass(eq=False)
class KnownTensors:
    """Modules and tensors of the program that the run knows."""

    modules: ModuleRegistry
    leaves: Leaves
    batch_tracker: BatchTracker
    """Finds the batch that a tensor comes from."""
    plain_leaves: PlainLeaves
    """Decides whether leaves that are not Parameters are weights or data."""
    synchronised_buffers: WeakIdKeyDictionary = field(default_factory=tensor_dictionary)
    """Buffers that lagom's forward keeps equal on all ranks."""
    repeated_inputs: WeakIdKeyDictionary = field(default_factory=tensor_dictionary)
    """Leaves whose gradients stay the rank's own, such as inputs of forwards that a backward recomputes."""

    @classmethod
    def of_run(cls, world_size: int, say_once: Callable[[str], None]) -> KnownTensors:
        """Return what a run on ``world_size`` ranks knows before it begins: nothing."""
        leaves, tracker = Leaves(), BatchTracker(world_size)
        return cls(ModuleRegistry(), leaves, tracker, PlainLeaves(tracker, leaves, say_once))


@dataclass(eq=False)
class ForwardState:
    """Forwards that run now or were split before."""

    whole_calls: WholeCalls
    """Calls of modules that run whole on every rank, with their reasons and time."""
    running_values: RunningValueDetector
    """Detector of values that forwards accumulate from their rows, such as running averages."""
    sliced_forward: SlicedForward | None = None
    """The sliced forward that is running; None outside of one."""
    micro_batch: MicroBatch | None = None
    """The micro-batch whose forward is running; None outside of one."""
    probe_statistics: BatchStatistics | None = None
    """Statistics for BatchNorm during a probe of a forward; None outside of a probe."""
    is_probing: bool = False
    has_sliced: bool = False
    """Whether ranks have split a forward by rows that may have gradients."""
    num_micro_batches: int = 1
    """Largest number of micro-batches in a forward so far."""
    shares_forwards: bool = True
    """Whether forwards can run in blocks of rows; not if hooks of modules exchange data between ranks."""

    @classmethod
    def of_run(cls, tensors: KnownTensors, say_once: Callable[[str], None]) -> ForwardState:
        """Return the state before the first forward."""
        return cls(WholeCalls(tensors.modules), RunningValueDetector(tensors.synchronised_buffers, say_once))

    def sliced_state(self) -> list[tuple[None, bool]]:
        """Return whether forwards have been split, for ``restore_sliced`` in another process."""
        return [(None, self.has_sliced)]

    def restore_sliced(self, state: Sequence[tuple[None, bool]]) -> None:
        """Continue as the process that returned ``state``."""
        ((_, self.has_sliced),) = state

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Context manager for a probe of a forward: gradients are not averaged, and autocast caches no casts.

        A cast that a probe caches may lack a gradient, and the program's own forward would use it again.
        """
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self.is_probing = True
        try:
            with self.sliced_forward.left_alone() if self.sliced_forward is not None else nullcontext():
                yield
        finally:
            self.is_probing = False
            torch.set_autocast_cache_enabled(before)

    @contextmanager
    def statistics(self, probed: BatchStatistics) -> Iterator[None]:
        """Context manager in which BatchNorm uses the statistics ``probed``."""
        self.probe_statistics = probed
        try:
            yield
        finally:
            self.probe_statistics = None


@dataclass(eq=False)
class BackwardState:
    """How gradients are averaged, and where they are."""

    loss_weights: LossTermWeights
    """Weights for the terms of losses."""
    agreement: AgreedExchange | None = None
    divergence: DivergenceMonitor | None = None
    gradient_averager: GradientAverager | None = None
    gradient_store: GradientStore = field(default_factory=GradientStore)
    """Where averaged gradients are between backwards; an extension replaces it before torch is patched."""
    parameter_store: ParameterStore = field(default_factory=ParameterStore)
    """Where the values of parameters are; an extension replaces it before torch is patched."""
    depth: int = 0
    """Depth of nested backwards. A forward that a backward recomputes must draw the same random numbers as before."""

    def exchange_by(
        self,
        group: Group,
        tensors: KnownTensors,
        likeness: Callable[[torch.Tensor], Likeness],
        config: TorchDistributedConfig,
        device: torch.device,
    ) -> None:
        """Average gradients by exchanges of ``group``."""
        modules = tensors.modules
        self.agreement = AgreedExchange(group, 0 if is_accelerator(device) else FRAME)
        self.divergence = DivergenceMonitor(
            group, tensors.leaves, modules.finished_modules, tensors.synchronised_buffers, modules.name_of
        )
        reduced = make_reduction(group, config.gradient_compression, config.reduction == "adasum")
        self.gradient_averager = GradientAverager(
            group, tensors.leaves, self.divergence, self.agreement, likeness, modules.name_of, reduced
        )


Learned: TypeAlias = Sequence[tuple[Any, Any]]
"""Pairs of an object of the program and a fact about it; the object is None for a fact about the whole program."""


@dataclass(eq=False)
class Resumption:
    """State that another process needs to continue the run."""

    is_resumable: bool = False
    """Whether another process may continue the program, which must then compute alike."""
    services: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = field(default_factory=dict)
    """By name, a function that returns the state of a library in this process, and one that sets it in another."""
    journal: str | None = None
    """File for the calls of trackers that a process which continues the run needs; None without one."""
    learned: dict[str, tuple[Callable[[], Learned], Callable[[Any], None]]] = field(default_factory=dict)
    """By name, a function that returns learned facts about the program, and one that sets them in another process."""
    shards: StateShards | None = None
    """Shards of the program's state on this rank; None if all ranks hold the same state."""
    parts: KeptParts | None = None
    """The shards of the snapshot from which this process continues; None without."""
