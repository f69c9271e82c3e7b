"""``watched``: a function is called for operations that draw or read numbers, and for no others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lagom.patching.watched_operations import is_watched, register_kernels, watched


class Notes:
    """A handler that records the names of operations."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.log.append(f"{self.name}{function.overloadpacket.__name__}")
        return function(*args, **kwargs)


def test_draws_and_reads_are_seen_and_others_are_not() -> None:
    log: list[str] = []
    x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    with watched(Notes("", log)):
        F.dropout(x.exp() @ x.t()).sum().backward()
        assert log == ["bernoulli_"]
        bool((x > 0).any())
        torch.rand(3)
        assert log == ["bernoulli_", "_local_scalar_dense", "rand"]
        nn.LSTM(4, 5, 2, dropout=0.5)(x[None])
        assert set(log[3:]) == {"uniform_", "bernoulli_"}
        assert len(x[x > 0]) == 6
        assert log[-1] == "index"
    before = list(log)
    torch.rand(3)
    assert log == before
    assert not is_watched()


def test_an_inner_handler_comes_first_and_an_error_ends_both() -> None:
    log: list[str] = []

    def draw_and_fail() -> None:
        with watched(Notes("outer ", log)):
            with watched(Notes("inner ", log)):
                torch.rand(2)
            torch.randn(2)
            raise LookupError

    with pytest.raises(LookupError):
        draw_and_fail()
    assert log == ["inner rand", "outer rand", "outer randn"]
    assert not is_watched()


def test_the_handlers_error_reaches_the_program() -> None:
    def refuse(*_: Any) -> Any:
        raise LookupError("no numbers")

    with pytest.raises(LookupError, match="no numbers"), watched(refuse):
        torch.rand(2)
    assert not is_watched()
    assert torch.rand(2).shape == (2,)


def test_other_threads_are_not_watched() -> None:
    log: list[str] = []
    with watched(Notes("", log)):
        thread = threading.Thread(target=torch.rand, args=(2,))
        thread.start()
        thread.join()
    assert log == []


def test_threads_that_inherit_the_key_do_not_disturb_each_other() -> None:
    """torch's own threads (of a backward, of TorchScript's fork) inherit it; here the threads set it themselves."""
    log: list[str] = []

    def draw() -> None:
        set_included = torch._C._dispatch_tls_set_dispatch_key_included
        set_included(torch._C.DispatchKey.PreDispatch, True)
        try:
            for _ in range(200):
                torch.rand(2)
        finally:
            set_included(torch._C.DispatchKey.PreDispatch, False)

    with watched(Notes("", log)):
        threads = [threading.Thread(target=draw) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(200):
            torch.rand(2)
        for thread in threads:
            thread.join()
    assert log == ["rand"] * 1000


def test_operations_that_a_program_adds_are_seen_once_they_are_registered() -> None:
    torch.library.define("lagom_tests::throw", "(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
    torch.library.impl("lagom_tests::throw", "CPU", lambda x: torch.rand(len(x)))
    log: list[str] = []
    register_kernels()
    with watched(Notes("", log)):
        assert torch.ops.lagom_tests.throw(torch.zeros(3)).shape == (3,)
    assert log == ["throw"]


def test_a_model_can_still_be_exported() -> None:
    register_kernels()
    program = torch.export.export(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)), (torch.zeros(4, 2),), strict=False)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names == ["aten.linear.default", "aten.dropout.default"]
    assert not is_watched()
