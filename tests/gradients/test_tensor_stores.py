"""What an extension gets to see of gradients: a store of its own, and the events around forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lagom.gradients.tensor_stores import GradientStore
from lagom.session.patched import patched
from lagom.session.session import Session
from tests.ranks import run_ranks


class Doubles(GradientStore):
    """Doubles each averaged gradient that it takes over."""

    keeps_shards = always_averages = True

    def end_backward(self, leaves: Iterable[Tensor]) -> None:
        """Double the gradients."""
        for leaf in leaves:
            assert leaf.grad is not None
            leaf.grad.mul_(2)


def _step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


def test_a_store_takes_over_the_averages() -> None:
    def train(session: Session) -> list[bool]:
        session.backwards.gradient_store = Doubles()
        with patched(session):
            torch.manual_seed(1)
            model, x = nn.Linear(3, 2), torch.randn(4, 3)
            found = []
            for _ in range(3):  # from the second on, backwards are repeated from the cache unless a store forbids it
                _step(model, x)
                assert model.weight.grad is not None
                found.append(model.weight.grad.clone())
        torch.manual_seed(1)
        plain, x = nn.Linear(3, 2), torch.randn(4, 3)
        _step(plain, x)
        assert plain.weight.grad is not None
        return [torch.allclose(one, 2 * plain.weight.grad) for one in found]

    assert run_ranks(2, train, batches="whole", patches=False) == [[True] * 3] * 2


def test_a_check_of_gradients_sees_those_that_are_there() -> None:
    model = nn.Linear(3, 2)
    model.weight.grad = torch.ones(2, 3)
    store = GradientStore()
    seen: list[Tensor | None] = []

    def check(gradients: Iterable[Tensor | None]) -> bool:
        seen.extend(gradients)
        return True

    assert store.check_all(list(model.parameters()), check, "here")
    assert [one is None for one in seen] == [False, True]
    assert [store.has_gradient(p) for p in model.parameters()] == [True, False]


def test_events_come_in_the_order_of_the_program() -> None:
    def train(session: Session) -> list[str]:
        seen: list[str] = []
        events = session.events

        def note(text: str) -> Callable[..., None]:
            return lambda *_: seen.append(text)

        for name in ("patched", "parameter_made", "forward_begun", "backward_begun", "backward_ended"):
            event: Any = getattr(events, name)
            event.subscribe(note(name))
        events.backward_begun.subscribe(lambda leaves: seen.append(str(len(leaves))))
        with patched(session):
            model, x = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), torch.randn(4, 3)
            for _ in range(3):  # the last ones from the cache
                _step(model, x)
        return seen

    step = ["forward_begun", "backward_begun", "4", "backward_ended"]
    wanted = ["patched", *["parameter_made"] * 4, *step, *step, *step]
    assert run_ranks(2, train, batches="whole", patches=False) == [wanted] * 2


def test_backwards_of_one_rank_are_published_too() -> None:
    def train(session: Session) -> list[Any]:
        seen: list[Any] = []
        model, x = nn.Linear(3, 2), torch.randn(4, 3)
        session.events.backward_begun.subscribe(lambda leaves: seen.append({id(leaf) for leaf in leaves}))
        session.events.backward_ended.subscribe(lambda: seen.append(model.weight.grad is not None))

        def fail(_: Tensor) -> None:
            raise KeyError

        with patched(session):
            _step(model, x)
            assert seen == [{id(model.weight), id(model.bias)}, True]
            # A backward inside a backward is part of it, autograd.grad is none, and one that fails does not end.
            inner = checkpoint(model, x.requires_grad_(), use_reentrant=True)
            inner.sum().backward()
            assert [type(one) for one in seen[2:]] == [set, bool]
            torch.autograd.grad(model(x).sum(), [model.weight])
            assert len(seen) == 4
            failing = model(x)
            failing.register_hook(fail)
            with pytest.raises(KeyError):
                failing.sum().backward()
            _step(model, x)
        _step(model, x)
        return [type(one).__name__ for one in seen]

    ended = ["set", "bool"]
    assert run_ranks(1, train, patches=False) == [[*ended, *ended, "set", *ended]]


def test_one_rank_without_a_subscriber_runs_torchs_own_backward() -> None:
    def train(session: Session) -> bool:
        original = torch.autograd._engine_run_backward
        with patched(session):
            return torch.autograd._engine_run_backward is original

    assert run_ranks(1, train, patches=False) == [True]
