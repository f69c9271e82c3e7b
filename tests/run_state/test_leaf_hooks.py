"""``lagom.run_state.leaf_hooks``: hooks of leaves and of their nodes are found as long as they exist."""

from __future__ import annotations

from typing import Any

import torch

from lagom.run_state.leaf_hooks import calls_hooks_after, has_hooks, watch_node_hooks
from lagom.run_state.leaves import ACCUMULATE


def test_hooks_of_a_node_are_those_of_its_leaf_until_they_are_removed() -> None:
    leaf, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    plain = ACCUMULATE.register_hook, ACCUMULATE.register_prehook
    with watch_node_hooks():
        kept: Any = leaf.view_as(leaf)
        node = kept.grad_fn.next_functions[0][0]
        before = node.register_prehook(print)
        assert (has_hooks(leaf), calls_hooks_after(leaf), has_hooks(other)) == (True, False, False)
        after = node.register_hook(print)
        before.remove()
        assert (has_hooks(leaf), calls_hooks_after(leaf)) == (True, True)
        after.remove()
        assert (has_hooks(leaf), calls_hooks_after(leaf)) == (False, False)
    assert plain == (ACCUMULATE.register_hook, ACCUMULATE.register_prehook)


def test_hooks_are_gone_with_their_node() -> None:
    leaf = torch.ones(1, requires_grad=True)
    with watch_node_hooks():
        kept: list[Any] = [leaf.view_as(leaf)]
        kept[0].grad_fn.next_functions[0][0].register_hook(print)
        assert has_hooks(leaf)
        kept.clear()
        assert not has_hooks(leaf)
