"""``has_live_graph``, ``with_old_graph``: find used-up autograd graphs, and stand in for them in another process."""

from __future__ import annotations

from typing import Any

import torch

from lagom.errors import LagomError


def has_live_graph(root: Any) -> bool:
    """Return whether the graph at ``root`` still has tensors for a backward, which frees them."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        if _has_saved(node):
            return True
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return False


def _saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def _has_saved(node: Any) -> bool:
    names = (*_saved_names(type(node)), *(["saved_tensors"] if hasattr(type(node), "saved_tensors") else []))
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:  # a backward has freed it
            return False
        if isinstance(value, (list, tuple)) and not value:
            continue
        if value is not None and not _is_empty(value):
            return True
    return False


def _is_empty(saved: Any) -> bool:
    try:
        return hasattr(saved, "data") and saved.data is None
    except RuntimeError:
        return False


def with_old_graph(value: torch.Tensor, name: str) -> torch.Tensor:
    """Return ``value`` with a ``grad_fn`` called ``name`` in place of its used-up graph; a backward raises an error."""
    kind: Any = type(name, (torch.autograd.Function,), {"forward": _forward, "backward": _backward})
    kind._backward_cls.__name__ = name
    with torch.enable_grad():
        found: torch.Tensor = kind.apply(value.requires_grad_())
    found.data = value.detach()  # the same memory: it may be a view of a parameter
    return found


@staticmethod  # type: ignore[misc]
def _forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
    return value.clone()


@staticmethod  # type: ignore[misc]
def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    raise LagomError(
        "a backward goes through a graph from before the snapshot that the run has gone on from; it has been used up "
        "there, or has nothing that lagom could save"
    )
