"""``Recorder``: what it follows, and what it costs to record the operations of a forward."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from lagom.forward.rows.input_reads import InputReadsRecorder
from lagom.forward.rows.recorder import Recorder
from lagom.patching.replace import replaced
from lagom.session.session import Session
from tests.ranks import run_ranks


def test_an_input_in_a_dict_or_a_list_is_followed() -> None:
    torch.library.define("lagom_tests::double", "(Dict(str, Tensor) of, Tensor[] more) -> (Tensor, Tensor[])")
    torch.library.impl(
        "lagom_tests::double", "CompositeExplicitAutograd", lambda of, more: (of["x"] * 2, [one * 2 for one in more])
    )
    x, other = torch.ones(2), torch.ones(2)
    for named, listed in (x, other), (other, x):
        recorder = Recorder([x], ())
        with recorder.entered():
            double, (doubled,) = torch.ops.lagom_tests.double({"x": named}, [listed])
        assert recorder.follows_input(double)
        assert recorder.follows_input(doubled)
    with recorder.entered():
        double, _ = torch.ops.lagom_tests.double({"x": other}, [])
    assert not recorder.follows_input(double)


def test_an_operation_is_recorded_in_few_calls() -> None:
    x, weight = torch.ones(2, 2, requires_grad=True), nn.Parameter(torch.ones(2, 2))
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    recorder = Recorder([x], [weight], InputReadsRecorder([x], []))
    with recorder.entered():
        torch.addmm(x, x, weight)  # fills caches
        sys.setprofile(count)
        try:
            torch.addmm(x, x, weight)
        finally:
            sys.setprofile(None)
    # torch.utils._pytree alone makes 30 for each list that it looks through.
    assert calls < 90


def num_lookups(session: Session) -> int:
    """Train a model for three steps, the second of which is after its probe; return how often operations are listed."""
    calls = 0
    original = torch._C._dispatch_get_all_op_names

    def count() -> Any:
        nonlocal calls
        calls += 1
        return original()

    model = nn.Linear(3, 2)
    with replaced(torch._C, "_dispatch_get_all_op_names", count):
        for _ in range(3):
            model(torch.randn(6, 3)).square().mean().backward()
    assert session.forwards.has_sliced
    return calls


def test_a_probe_looks_once_for_new_operations() -> None:
    assert run_ranks(2, num_lookups, batches="whole") == [1, 1]
