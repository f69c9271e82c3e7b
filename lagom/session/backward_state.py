"""``BackwardState``: how gradients are averaged, and where they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lagom.exchange.agreement_exchange import FRAME, AgreedExchange
from lagom.gradients.divergence import DivergenceMonitor
from lagom.gradients.gradient_averager import GradientAverager
from lagom.gradients.gradient_store import GradientStore
from lagom.gradients.reduction.mean import make_reduction
from lagom.run_state.parameter_store import ParameterStore

if TYPE_CHECKING:
    import torch

    from lagom.config import TorchDistributedConfig
    from lagom.exchange.group import Group
    from lagom.run_state.loss_terms import LossTermWeights
    from lagom.run_state.plain_leaves import Likeness
    from lagom.session.known_tensors import KnownTensors


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
        self.agreement = AgreedExchange(group, 0 if device.type == "cuda" else FRAME)
        self.divergence = DivergenceMonitor(
            group, tensors.leaves, modules.finished_modules, tensors.synchronised_buffers, modules.name_of
        )
        reduced = make_reduction(group, config.gradient_compression, config.reduction == "adasum")
        self.gradient_averager = GradientAverager(
            group, tensors.leaves, self.divergence, self.agreement, likeness, modules.name_of, reduced
        )
