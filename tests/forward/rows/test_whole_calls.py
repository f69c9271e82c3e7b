"""``WholeCalls``: which modules ran whole, why, how often, and for which share of the time."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lagom.forward.rows import whole_calls
from lagom.forward.rows.whole_calls import WholeCalls
from lagom.forward.rows.whole_reasons import WholeReason
from lagom.run_state.module_registry import ModuleRegistry
from lagom.session.session import Session
from tests.ranks import run_ranks


class Mixing(nn.Module):
    """Mixes the rows of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Any:
        found = self.linear(x)
        return found - found.mean(0)


class Net(nn.Module):
    """Has a part that mixes rows and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Mixing(), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoder(x))


class Hiding(nn.Module):
    """Mixes rows, and calls a module that is no attribute of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.hidden = [nn.Linear(5, 5)]

    def forward(self, x: Tensor) -> Any:
        found = self.hidden[0](x) * self.scale
        return found - found.mean(0)


class Counting(nn.Linear):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


Calls = Callable[[nn.Module], None]


def random_batches(module: nn.Module) -> None:
    for _ in range(6):
        module(torch.randn(8, 5)).sum().backward()


def equal_rows(module: nn.Module) -> None:
    for _ in range(6):
        module(torch.ones(8, 5))


def single_rows(module: nn.Module) -> None:
    for _ in range(6):
        module(torch.randn(1, 5))


def dual_numbers(module: nn.Module) -> None:
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch loads functions that it scripts itself
        module(forward_ad.make_dual(torch.randn(8, 5), torch.randn(8, 5)))


def of_many_kinds(module: nn.Module) -> None:
    for number in range(66):
        module.kind = number  # type: ignore[assignment]
        module(torch.randn(8, 5))


def whole(world_size: int, make: Callable[[], nn.Module], run: Calls = random_batches, **options: Any) -> list[Any]:
    """Return for each rank the modules that ran whole, and the lines about them."""

    def program(session: Session) -> Any:
        torch.manual_seed(0)
        module = make()
        run(module)
        return session.forwards.whole_calls.modules(), [text for text in session.said if "whole" in text]

    return run_ranks(world_size, program, batches="whole", **options)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_module_and_its_parts_are_listed_with_their_calls(world_size: int) -> None:
    for modules, lines in whole(world_size, Net):
        found = {one.name: one for one in modules}
        assert set(found) == {"Net", "Net.encoder"}
        outer, inner = found["Net"], found["Net.encoder"]
        assert (outer.kind, inner.kind) == ("Net", "Mixing")
        assert outer.reason is inner.reason is WholeReason.MIXES_ROWS
        # The first call of each is an examination; the parts are called by themselves once the whole is refused.
        assert (outer.calls, inner.calls) == (5, 4)
        assert outer.splits_inside
        assert 0 < outer.share + inner.share < 1
        assert [one.share for one in modules] == sorted((one.share for one in modules), reverse=True)
        assert lines == [
            f"Net runs whole on every rank (modules inside it are split where they can be): it {outer.text}"
        ]


def test_one_rank_runs_nothing_whole_that_might_be_split() -> None:
    assert whole(1, Net) == [([], [])]


def test_a_module_that_is_split_is_not_listed() -> None:
    assert whole(2, lambda: nn.Linear(5, 1)) == [([], [])] * 2


def test_the_line_does_not_deny_that_a_module_without_submodules_may_call_others() -> None:
    for modules, lines in whole(2, Hiding):
        assert [(one.name, one.splits_inside) for one in modules] == [("Hiding", True)]
        assert len(lines) == 1
        assert "not faster" not in lines[0]


CASES: dict[WholeReason, tuple[Callable[[], nn.Module], Calls, int]] = {
    WholeReason.EQUAL_ROWS: (lambda: nn.Linear(5, 1), equal_rows, 5),
    WholeReason.FEW_ROWS: (lambda: nn.Linear(5, 1), single_rows, 6),
    WholeReason.FORWARD_MODE: (lambda: nn.Linear(5, 1), dual_numbers, 1),
    WholeReason.CHANGES_NUMBERS: (Counting, random_batches, 4),
    WholeReason.MANY_KINDS: (lambda: nn.Linear(5, 5), of_many_kinds, 2),
}


@pytest.mark.parametrize("reason", CASES, ids=lambda reason: reason.name)
def test_each_reason_is_told(reason: WholeReason) -> None:
    make, run, num_calls = CASES[reason]
    for modules, _ in whole(2, make, run):
        assert [(one.reason, one.calls, one.share) for one in modules] == [(reason, num_calls, 1.0)]


def test_a_small_module_is_listed_where_it_is_outermost_only() -> None:
    for modules, _ in whole(2, lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1)), always_slices=False):
        assert [(one.name, one.reason, one.calls) for one in modules] == [("Sequential", WholeReason.SMALL, 5)]


def test_calls_of_a_small_module_are_counted_in_a_resumed_run_too() -> None:
    def program(session: Session) -> Any:
        module, loss = nn.Linear(5, 1), nn.MSELoss()
        state, go_on = session.resumption.learned["forwards"]
        for _ in range(2):
            for _ in range(3):
                loss(module(torch.randn(8, 5)), torch.zeros(8, 1))
            go_on(state())
        return [(one.name, one.reason, one.calls) for one in session.forwards.whole_calls.modules()]

    assert run_ranks(2, program, batches="whole", always_slices=False) == [[("Linear", WholeReason.SMALL, 5)]] * 2


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch does not support torch.jit.script there")
def test_torchscript_is_listed() -> None:
    def scripted() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(nn.Linear(5, 1))

    for modules, lines in whole(2, scripted):
        assert [(one.reason, one.calls) for one in modules] == [(WholeReason.TORCHSCRIPT, 6)]
        assert len(lines) == 1
        assert "which is right but not faster" in lines[0]


def test_a_module_whose_forward_fails_is_counted_and_the_time_after_it_is_not() -> None:
    def failing(module: nn.Module) -> None:
        random_batches(module)
        with pytest.raises(RuntimeError):
            module(torch.randn(8, 4))
        random_batches(module)

    for modules, _ in whole(2, Mixing, failing):
        assert modules[0].calls >= 11
        assert modules[0].name == "Mixing"


def test_time_belongs_to_the_innermost_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(whole_calls, "perf_counter", lambda: now)
    registry = ModuleRegistry()
    net = Net()
    for module in net.modules():
        registry[module] = None
    calls = WholeCalls(registry)
    assert registry.path_of(net.encoder.linear) == "Net.encoder.linear"
    outer = calls.account({}, net, WholeReason.MIXES_ROWS.filled())
    inner = calls.account({}, net.encoder, WholeReason.HAS_HOOKS.filled())
    for _ in range(2):
        now += 100  # outside of forwards
        with outer:
            now += 1
            with inner:
                now += 2
            now += 1
            with calls.split:
                now += 6
    found = {one.name: one for one in calls.modules()}
    assert {name: (one.calls, one.share) for name, one in found.items()} == {"Net": (2, 0.2), "Net.encoder": (2, 0.2)}
    assert (found["Net"].splits_inside, found["Net.encoder"].splits_inside) == (True, False)
    assert repr(found["Net"]) == (
        "<Net: 2 calls, 20.0% of the time of forwards, modules inside it are split: "
        "it does not compute the rows of its batch one by one>"
    )
    assert repr(found["Net.encoder"]).startswith("<Net.encoder (Mixing): 2 calls, 20.0%")
    assert repr(found["Net.encoder"]).endswith("; remove them, or return what they look at>")


def test_modules_that_a_program_makes_anew_need_no_more_than_a_few_names() -> None:
    registry = ModuleRegistry()
    calls = WholeCalls(registry)
    outer = nn.ModuleList([nn.Linear(1, 1) for _ in range(200)])
    for module in outer.modules():
        registry[module] = None
    for module in outer:
        with calls.account({}, module, WholeReason.SMALL.filled()):
            pass
    names = [one.name for one in calls.modules()]
    assert len(names) < 100
    assert {"ModuleList.0", "Linear"} < set(names)
    assert sum(one.calls for one in calls.modules()) == 200


class Reader(nn.Module):
    """Reads a packed sequence, also as an argument in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 4), nn.Linear(4, 1)

    def forward(self, sequence: Any) -> Tensor:
        packed = sequence["words"] if isinstance(sequence, dict) else sequence
        result: Tensor = self.out(self.lstm(packed)[1][0][-1])
        return result


def packed_batches(module: nn.Module) -> None:
    for _ in range(3):
        sequences = [torch.randn(steps, 3) for steps in (5, 4, 4, 2, 2, 1)]
        packed = nn.utils.rnn.pack_sequence(sequences)
        module(packed)
        module({"words": packed})


def test_a_module_that_is_called_with_a_packed_sequence_runs_whole() -> None:
    for modules, _ in whole(2, Reader, packed_batches, always_slices=True):
        reader = next(one for one in modules if one.name == "Reader")
        assert reader.reason is WholeReason.PACKED_SEQUENCE
        assert "pack the sequences inside of the module" in reader.remedy
