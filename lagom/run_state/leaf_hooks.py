"""``watch_node_hooks``: finds the hooks of leaves, and those of the AccumulateGrad nodes of leaves."""

from __future__ import annotations

import functools
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from lagom.patching.object_reference import HiddenReference
from lagom.patching.replace import replaced
from lagom.run_state.leaves import ACCUMULATE, leaf_of_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


class _NodeHooks(NamedTuple):
    """References to the dicts in which nodes of a leaf have their hooks; a node that is gone has left a dead one."""

    leaf: HiddenReference[torch.Tensor]
    before: list[weakref.ref[dict[int, Any]]]
    after: list[weakref.ref[dict[int, Any]]]


_of_nodes: dict[int, _NodeHooks] = {}
"""By id of the leaf."""


@contextmanager
def watch_node_hooks() -> Iterator[None]:
    """Context manager in which hooks of AccumulateGrad nodes are recorded when the program registers them.

    A node does not tell its hooks, but the handle of a hook refers to the dict in which they are.
    """
    with (
        replaced(ACCUMULATE, "register_prehook", _make_register("register_prehook", "before")),
        replaced(ACCUMULATE, "register_hook", _make_register("register_hook", "after")),
    ):
        yield


def hooks_before(leaf: torch.Tensor) -> list[dict[int, Any]]:
    """Return the dicts with the hooks that nodes of ``leaf`` call before they accumulate its gradient."""
    return _living(found.before) if (found := _find(leaf)) is not None else []


def hooks_after(leaf: torch.Tensor) -> list[dict[int, Any]]:
    """Return the dicts with the hooks that nodes of ``leaf`` call after they have accumulated its gradient."""
    return _living(found.after) if (found := _find(leaf)) is not None else []


def has_hooks(leaf: torch.Tensor) -> bool:
    """Return whether a backward that reaches ``leaf`` calls a hook of the leaf or of its node."""
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return True
    return id(leaf) in _of_nodes and any((*hooks_before(leaf), *hooks_after(leaf)))


def calls_hooks_after(leaf: torch.Tensor) -> bool:
    """Return whether a hook of ``leaf`` or of its node is called when its gradient has been accumulated."""
    return bool(leaf._post_accumulate_grad_hooks) or any(hooks_after(leaf))


def _make_register(name: str, place: str) -> Callable[..., Any]:
    original = getattr(ACCUMULATE, name)

    @functools.wraps(original)
    def register(node: Any, *args: Any, **options: Any) -> Any:
        handle = original(node, *args, **options)
        dicts = getattr(_hooks_of(leaf_of_node(node)), place)
        if all(known() is not handle.hooks_dict_ref() for known in dicts):
            dicts[:] = [known for known in dicts if known() is not None] + [handle.hooks_dict_ref]
        return handle

    return register


def _hooks_of(leaf: torch.Tensor) -> _NodeHooks:
    if (hooks := _find(leaf)) is not None:
        return hooks
    key = id(leaf)

    def forget(_: object) -> None:
        # A callback that comes late must not remove the entry of a newer leaf with the same id.
        if _of_nodes.get(key) is made:
            del _of_nodes[key]

    made = _of_nodes[key] = _NodeHooks(HiddenReference(leaf, forget), [], [])
    return made


def _find(leaf: torch.Tensor) -> _NodeHooks | None:
    found = _of_nodes.get(id(leaf))
    return found if found is not None and found.leaf() is leaf else None


def _living(dicts: list[weakref.ref[dict[int, Any]]]) -> list[dict[int, Any]]:
    return [hooks for one in dicts if (hooks := one()) is not None]
