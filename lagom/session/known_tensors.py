"""``KnownTensors``: modules and tensors of the program that a run knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.utils.weak import WeakIdKeyDictionary

from lagom.patching.object_reference import tensor_dictionary
from lagom.run_state.batch_origin import BatchTracker
from lagom.run_state.leaves import Leaves
from lagom.run_state.module_registry import ModuleRegistry
from lagom.run_state.plain_leaves import PlainLeaves


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
