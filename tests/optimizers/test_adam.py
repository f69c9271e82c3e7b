"""``lagom.optimizers.adam``: the bits of torch's Adam and AdamW; torch's own function where they are not certain."""

from __future__ import annotations

import copy
import importlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lagom.collectives.native import native
from lagom.optimizers import adam
from lagom.optimizers.adam import Adam
from lagom.patching.replace import replaced
from lagom.session.session import Session
from tests.ranks import alone, run_ranks
from tests.session.programs import data, mlp

MODULE = importlib.import_module("torch.optim.adam")
TORCHS = vars(MODULE)["_single_tensor_adam"]
SIZES = [(), (1,), (7,), (0,), (33,), (5, 13), (130, 131), (2, 3, 4)]
"""One is larger than what is stepped at a time."""
needs_native = pytest.mark.skipif(native() is None, reason="lagom was installed without its compiled part")
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Counted(Adam):
    """Counts the steps that torch's function makes, but for those of trials."""

    def __init__(self, torchs: Callable[..., None] = TORCHS) -> None:
        self.num_torchs = 0
        self.tries = False

        def counted(*args: Any, **options: Any) -> None:
            self.num_torchs += not self.tries
            torchs(*args, **options)

        super().__init__(counted)

    def _trial(self, *args: Any) -> bool | None:
        self.tries = True
        try:
            return super()._trial(*args)
        finally:
            self.tries = False


@pytest.fixture
def ours() -> Iterator[Counted]:
    """In the place of torch's function."""
    found = Counted()
    with replaced(MODULE, "_single_tensor_adam", found.step):
        yield found


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator, dtype=dtype)) for size in SIZES]


def give_gradients(params: list[nn.Parameter], number: int) -> None:
    """Of many magnitudes; every third step has none for one of the parameters."""
    generator = torch.Generator().manual_seed(number)
    for i, p in enumerate(params):
        scale = 10.0 ** ((number * 7 + i) % 12 - 8)
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) * scale
    if number % 3 == 2:
        params[4].grad = None


def stepped(make: Make, dtype: torch.dtype, num_steps: int = 8) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """With another rate in the end, a copy and a reloaded state on the way."""
    params = parameters(dtype)
    optimizer = make(params)
    for number in range(num_steps):
        if number == 3:
            copied, params = copy.deepcopy((optimizer, params))
            optimizer = copied
        if number == 5:
            held = io.BytesIO()
            torch.save(optimizer.state_dict(), held)
            held.seek(0)
            optimizer = make(params)
            optimizer.load_state_dict(torch.load(held))
        if number == 6:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
        give_gradients(params, number)
        optimizer.step()
    return params, optimizer


def bits(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[tuple[str, bytes]]:
    found = [("value", p.detach()) for p in params]
    found += [(key, value) for p in params for key, value in optimizer.state[p].items()]
    return [(key, value.contiguous().numpy().tobytes()) for key, value in found]


def in_groups(kind: Callable[..., torch.optim.Optimizer]) -> Make:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return kind([{"params": params[:3]}, {"params": params[3:], "lr": 0.3, "weight_decay": 0.2}], lr=0.01)

    return make


SETTINGS: dict[str, Make] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "decay": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.05),
    "maximize": lambda params: torch.optim.AdamW(params, weight_decay=0.3, maximize=True),
    "maximize with decay": lambda params: torch.optim.Adam(params, weight_decay=0.3, maximize=True),
    "other averages": lambda params: torch.optim.Adam(params, betas=(0.3, 0.5), eps=1e-3),
    "no averages": lambda params: torch.optim.Adam(params, betas=(0.0, 0.0)),
    "groups": in_groups(torch.optim.Adam),
    "groups of AdamW": in_groups(torch.optim.AdamW),
}


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("setting", SETTINGS)
def test_bits_are_those_of_torch(setting: str, dtype: torch.dtype) -> None:
    wanted = bits(*stepped(SETTINGS[setting], dtype))
    found = Counted()
    with replaced(MODULE, "_single_tensor_adam", found.step):
        assert bits(*stepped(SETTINGS[setting], dtype)) == wanted
    assert found.num_torchs == 0


@needs_native
def test_numbers_of_steps_may_be_of_float64(ours: Counted) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = bits(*stepped(torch.optim.Adam, torch.float32))
        with replaced(MODULE, "_single_tensor_adam", TORCHS):
            assert bits(*stepped(torch.optim.Adam, torch.float32)) == found
    finally:
        torch.set_default_dtype(before)
    assert ours.num_torchs == 0


@needs_native
def test_infinite_and_undefined_numbers_are_where_torch_has_them(ours: Counted) -> None:
    def run() -> list[Tensor]:
        p = nn.Parameter(torch.ones(40))
        optimizer = torch.optim.Adam([p])
        for special in (float("inf"), float("nan"), 1e38, 1e-45):
            p.grad = torch.ones(40)
            p.grad[::7] = special
            optimizer.step()
        return [p.detach(), *optimizer.state[p].values()]

    found = run()
    with replaced(MODULE, "_single_tensor_adam", TORCHS):
        wanted = run()
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, wanted, strict=True))
    assert ours.num_torchs == 0


def transposed() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(5, 7).t())]


UNUSUAL: dict[str, tuple[Make, Callable[[], list[nn.Parameter]]]] = {
    "amsgrad": (lambda params: torch.optim.Adam(params, amsgrad=True), parameters),
    "a rate that is a tensor": (lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1)), parameters),
    "halves": (torch.optim.Adam, lambda: [nn.Parameter(torch.randn(9, dtype=torch.bfloat16))]),
    "complex numbers": (torch.optim.Adam, lambda: [nn.Parameter(torch.randn(9, dtype=torch.complex64))]),
    "another order in memory": (torch.optim.Adam, transposed),
    "two types": (torch.optim.Adam, lambda: parameters()[:3] + parameters(torch.float64)[:3]),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_not_as_usual_is_stepped_by_torch(case: str, ours: Counted) -> None:
    make, params_of = UNUSUAL[case]

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        params = params_of()
        optimizer = make([*params, nn.Parameter(torch.zeros(0))])
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [p.detach() for p in params]

    found = run()
    assert ours.num_torchs == 3
    with replaced(MODULE, "_single_tensor_adam", TORCHS):
        assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))


def test_who_looks_at_operations_sees_those_of_torch(ours: Counted) -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([p])
    p.grad = torch.ones(4)
    with FlopCounterMode(display=False):
        optimizer.step()
    assert ours.num_torchs == 1
    with torch.profiler.profile() as seen:
        optimizer.step()
    assert ours.num_torchs == 2
    assert any(event.name == "aten::addcdiv_" for event in seen.events() or [])


def own_gradients(params: list[nn.Parameter], _: torch.optim.Optimizer) -> None:
    for p in params:
        p.grad = p.data  # as who trains towards zero may have it


def one_count(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    first = optimizer.state[params[0]]
    for p in params:
        if "step" in first:
            optimizer.state[p]["step"] = first["step"]


def views(params: list[nn.Parameter], _: torch.optim.Optimizer) -> None:
    params[1].data = params[0].data[:4]
    params[1].grad = torch.ones(4)


@pytest.mark.parametrize(("overlap", "num_torchs"), [(own_gradients, 3), (one_count, 2), (views, 2)])
def test_memory_that_overlaps_is_stepped_by_torch(
    overlap: Callable[[list[nn.Parameter], torch.optim.Optimizer], None], num_torchs: int, ours: Counted
) -> None:
    def run() -> list[Tensor]:
        params = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.full((4,), 2.0))]
        optimizer = torch.optim.AdamW(params, lr=0.1)
        for number in range(3):
            for p in params:
                p.grad = torch.full_like(p, 0.3)
            if number or overlap is not views:
                overlap(params, optimizer)
            optimizer.step()
        return [p.detach() for p in params]

    found = run()
    assert ours.num_torchs == (num_torchs if native() is not None else 3)
    with replaced(MODULE, "_single_tensor_adam", TORCHS):
        assert all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))


@needs_native
def test_gradients_may_be_shared(ours: Counted) -> None:
    p, q = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
    optimizer = torch.optim.Adam([p, q])
    p.grad = q.grad = torch.ones(8)
    optimizer.step()
    assert ours.num_torchs == 0
    assert torch.equal(p, q)


@needs_native
def test_a_thread_that_steps_meanwhile_does_not_step_in_the_same_room(ours: Counted) -> None:
    params = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))]
    optimizers = [torch.optim.Adam([p]) for p in params]

    def give(number: int) -> None:
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 1.0 + i + number)

    for number in range(2):
        give(number)
        for optimizer in optimizers:
            optimizer.step()
    give(2)
    root = torch.sqrt_

    def interrupted(room: Tensor) -> Tensor:
        if ours.num_torchs == 0:
            ours.num_torchs = 1
            with ThreadPoolExecutor(1) as another:
                another.submit(optimizers[1].step).result()
        return root(room)

    with replaced(torch, "sqrt_", interrupted):
        optimizers[0].step()
    assert ours.num_torchs == 2
    found = [p.detach().clone() for p in params]
    params[:] = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))]
    with replaced(MODULE, "_single_tensor_adam", TORCHS):
        optimizers = [torch.optim.Adam([p]) for p in params]
        for number in range(3):
            give(number)
            for optimizer in optimizers:
                optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(found, params, strict=True))


def test_shapes_that_differ_are_an_error_as_in_torch(ours: Counted) -> None:
    p = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.Adam([p])
    p.grad = torch.ones(8)
    optimizer.step()
    p.data = torch.ones(5)
    p.grad = torch.ones(5)
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()


@needs_native
def test_a_graph_knows_that_its_parameters_have_changed(ours: Counted) -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([p])
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert ours.num_torchs == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_native
def test_other_bits_are_noticed_before_anything_is_stepped(monkeypatch: pytest.MonkeyPatch, ours: Counted) -> None:
    made = native().AdamStep

    class Wrong:
        AdamStep = staticmethod(lambda *args: made(*args[:4], args[4] * (1 - 1e-6), *args[5:]))

    monkeypatch.setattr(adam, "native", lambda: Wrong)
    found = bits(*stepped(torch.optim.Adam, torch.float32))
    assert ours.num_torchs == 8
    with replaced(MODULE, "_single_tensor_adam", TORCHS):
        assert bits(*stepped(torch.optim.Adam, torch.float32)) == found


@needs_native
def test_large_ones_are_left_to_many_threads(ours: Counted) -> None:
    p = nn.Parameter(torch.ones(adam._LARGE))
    optimizer = torch.optim.Adam([p])
    p.grad = torch.ones_like(p)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(adam._THREADS + 1)
        optimizer.step()
        assert ours.num_torchs == 1
        torch.set_num_threads(1)
        optimizer.step()
        assert ours.num_torchs == 1
    finally:
        torch.set_num_threads(before)


def program(_: Session | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for x, y in DataLoader(data(58), batch_size=6):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def counted_on_a_rank(session: Session) -> tuple[list[Tensor], int, bool]:
    function = vars(MODULE)["_single_tensor_adam"]
    called = []

    def counted(*args: Any, **options: Any) -> None:
        called.append(1)
        function(*args, **options)

    with replaced(MODULE, "_single_tensor_adam", counted):
        return program(session), len(called), function is TORCHS


@pytest.mark.parametrize("zero_lvl", [0, 1])
def test_ranks_step_at_once_and_become_what_one_process_becomes(zero_lvl: int) -> None:
    wanted = alone(program)
    for found, num_steps, is_torchs in run_ranks(2, counted_on_a_rank, zero_lvl=zero_lvl):
        assert num_steps >= 10  # the first level steps small copies, too
        assert not is_torchs
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    assert vars(MODULE)["_single_tensor_adam"] is TORCHS
