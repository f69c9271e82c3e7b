"""``ModuleRegistry``: all that the program has made, and what is asked of them together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary

from lagom.patching.object_reference import ObjectReference

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from lagom.run_state.leaves import Leaves


class ModuleRegistry(WeakIdKeyDictionary):
    """Modules, in the order in which they were made, without those that are gone."""

    def __init__(self) -> None:
        super().__init__(ref_type=ObjectReference)

    def made(self) -> Iterator[nn.Module]:
        """Those whose construction has come as far as to have parameters."""
        return (module for module in list(self) if "_parameters" in module.__dict__)

    def in_eval_mode(self, leaves: Leaves, reached: set[int]) -> bool:
        """Whether those that are trained all are.

        Args:
            leaves: know parameters by number.
            reached: the numbers of those that a backward has reached; empty before the first one.
        """
        trained = False
        for module in self.made():
            own = [p for p in module.__dict__.get("_parameters", {}).values() if p is not None and p.requires_grad]
            if reached:
                own = [p for p in own if leaves.known(p) in reached]
            if own:
                if module.__dict__.get("training", True):
                    return False
                trained = True
        return trained

    def name_of(self, leaf: torch.Tensor | None) -> str:
        """What to call a leaf in a message."""
        if leaf is None:
            return "a tensor that this rank does not have"
        best = ""
        for module in self.made():
            for name, parameter in module.named_parameters():
                full = f"{type(module).__name__}.{name}"
                # The longest path starts at the outermost module.
                if parameter is leaf and full.count(".") > best.count("."):
                    best = full
        shape = tuple(leaf.shape)
        return f"the parameter {best} of shape {shape}" if best else f"a tensor of shape {shape}"
