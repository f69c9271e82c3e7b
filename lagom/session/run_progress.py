"""``RunProgress``: how far the program is on this rank."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lagom.run_state.loader_pass import PassTracker


@dataclass(eq=False)
class RunProgress:
    """How far the program is; ``report`` may be called from another thread."""

    passes: PassTracker
    is_called: bool = False
    """Whether the training function has been called, so that the rank no longer counts as starting."""
    samples_trained: int = 0
    ticks: int = 0
    """Batches, forwards and backwards so far; the heartbeat sends them to the stall detector of the host."""
    data_s: float = 0.0
    """Seconds that the program has waited for batches."""
    num_workers: int | None = None
    """Number of workers of the loader over which the last training pass began; None before the first."""
    loading_reason: str = ""
    """Why every rank loads all samples of the last loader without workers whose loading is slow; empty if none does."""
    loss: torch.Tensor | None = None
    """Loss of the last backward, without its graph; None unless it is one number on the CPU."""
    reported_values: dict[str, float | int] = field(default_factory=dict)
    """Values that the program reported last; shown with the progress."""
    progress_values: dict[str, float] = field(default_factory=dict)
    """Further values by name, which extensions set, and which are shown with the progress of this rank."""
    pictures: deque[str] = field(default_factory=deque)
    """Pictures that the program has shown and that are not sent to the driver yet, as PNG in base64."""

    def report(self) -> dict[str, Any]:
        """Return the progress of training as fields of ``ProgressReport``."""
        now: dict[str, Any] = {**self.passes.progress, "samples": self.samples_trained, "ticks": self.ticks}
        loss = self.loss
        now |= {"starts": not self.is_called, "loss": None if loss is None else float(loss)}
        now["values"] = dict(self.progress_values)
        return {**now, **self.reported_values}
