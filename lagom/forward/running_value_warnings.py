"""``RunningValueDetector``: find modules whose forwards keep running values of a rank's share of each batch."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from torch import Tensor, nn


_CONTAINERS = "torch.nn.modules.container"
"""Python module of torch's containers, which are examined too: their values belong to the layer around them."""


class RunningValueDetector:
    """Examines the second training forward of each outermost module, as the first may make parameters.

    Args:
        synchronised: buffers that follow the whole batch, as BatchNorm's do.
        say_once: logs a warning, unless the same text was logged before.
    """

    def __init__(self, synchronised: Container[Tensor], say_once: Callable[[str], None]) -> None:
        self._synchronised = synchronised
        self._say_once = say_once
        self._num_calls: dict[int, int] = {}
        """Training forwards of each living module, by id, up to 2."""

    def snapshot(self, module: nn.Module) -> list[tuple[str, Tensor, int]] | None:
        """Return name and version of each tensor that ``module`` might change; None if this call is not examined."""
        calls = self._num_calls.get(id(module), 0)
        if calls > 1:
            return None
        if not calls:
            weakref.finalize(module, self._num_calls.pop, id(module), None).atexit = False
        self._num_calls[id(module)] = calls + 1
        return [(name, one, one._version) for name, one in _named_tensors(module)] if calls else None

    def warn_about_changes(self, module: nn.Module, seen: list[tuple[str, Tensor, int]]) -> None:
        """Warn about values that a forward of ``module`` has changed."""
        changed = [name for name, one, version in seen if one._version != version and one not in self._synchronised]
        if changed:
            self._say_once(_CHANGED.format(kind=type(module).__name__, name=changed[0]))


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield floating-point buffers and frozen parameters of layers that are not torch's own, with their names."""
    for path, part in _named_modules(module):
        if type(part).__module__.startswith("torch.") and type(part).__module__ != _CONTAINERS:
            continue
        frozen = {name: one for name, one in part._parameters.items() if one is not None and not one.requires_grad}
        for name, one in {**part._buffers, **frozen}.items():
            if one is not None and not is_lazy(one) and one.is_floating_point() and not one.is_inference():
                yield f"{path}.{name}" if path else name, one


def _named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module and those inside it, by name; torch's own walk hashes modules, and a class may forbid that."""
    met, left = {id(module)}, [("", module)]
    while left:
        path, part = left.pop()
        yield path, part
        for name, child in part._modules.items():
            if child is not None and id(child) not in met:
                met.add(id(child))
                left.append((f"{path}.{name}" if path else name, child))


_CHANGED = (
    "the forward of {kind} changes its {name}: where that is made of the rows it is called with, as by a batch "
    "normalisation of its own, it is made of this rank's share of a batch, with batches='split', and so is what the "
    "forward gives; batches='whole' has it see the whole batch"
)
