"""``ForwardState``: forwards that run now or were split before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lagom.forward.rows.whole_calls import WholeCalls
from lagom.forward.running_value_warnings import RunningValueDetector

if TYPE_CHECKING:
    from lagom.forward.rows.recorder import BatchStatistics
    from lagom.forward.rows.sliced_forward import MicroBatch, SlicedForward
    from lagom.session.known_tensors import KnownTensors


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
