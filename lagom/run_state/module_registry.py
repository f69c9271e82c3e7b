"""``ModuleRegistry``: the modules that the program has made, their modes, their names and those of parameters."""

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
    """Tracks the program's living modules in the order of their creation, and names their parameters."""

    def __init__(self) -> None:
        super().__init__(ref_type=ObjectReference)

    def finished_modules(self) -> Iterator[nn.Module]:
        """Iterate over the modules for which ``Module.__init__`` has run, so that they can have parameters."""
        return (module for module in list(self) if "_parameters" in module.__dict__)

    def in_eval_mode(self, leaves: Leaves, reached: set[int]) -> bool:
        """Return whether all trained modules are in eval mode; False if none is trained.

        Args:
            leaves: knows the numbers of parameters.
            reached: the numbers of the parameters that a backward has reached; empty before the first backward.
        """
        trained = False
        for module in self.finished_modules():
            own = [p for p in module.__dict__.get("_parameters", {}).values() if p is not None and p.requires_grad]
            if reached:
                own = [p for p in own if leaves.known(p) in reached]
            if own:
                if module.__dict__.get("training", True):
                    return False
                trained = True
        return trained

    def path_of(self, module: nn.Module) -> str:
        """Return the class of the outermost module around ``module``, and the path of attributes from there."""
        parents = {
            id(child): (outer, name)
            for outer in self.finished_modules()
            for name, child in outer._modules.items()
            if child is not None
        }
        names: list[str] = []
        while (parent := parents.pop(id(module), None)) is not None:  # popped, as modules may refer to each other
            module, name = parent
            names.insert(0, name)
        return ".".join([type(module).__name__, *names])

    def name_of(self, leaf: torch.Tensor | None) -> str:
        """Return a description of ``leaf`` for messages; None stands for a tensor that this rank does not have."""
        if leaf is None:
            return "a tensor that this rank does not have"
        best = ""
        for module in self.finished_modules():
            for name, parameter in module.named_parameters():
                full = f"{type(module).__name__}.{name}"
                # The same parameter has a path from each enclosing module: the longest starts at the outermost module.
                if parameter is leaf and full.count(".") > best.count("."):
                    best = full
        shape = tuple(leaf.shape)
        return f"the parameter {best} of shape {shape}" if best else f"a tensor of shape {shape}"
