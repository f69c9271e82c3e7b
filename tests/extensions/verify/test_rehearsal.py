"""``verify.on_rank.rehearsal`` and what it is made of: passes cut short, and what is noted of a program."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lagom.extensions.verify.on_rank.record import Record
from lagom.extensions.verify.on_rank.tensor_sketch import digests, flat, sketch
from lagom.plan import Rehearsal
from lagom.session.patched import patched
from lagom.session.session import Session
from tests.ranks import run_ranks, session_alone


def rehearsed(tmp_path: Path, function: Any, **settings: Any) -> Record:
    """``function`` rehearsed in this process, on one rank."""
    session = session_alone(tmp_path)
    session.plan = dataclasses.replace(session.plan, rehearsal=Rehearsal(**settings))
    return run_as_rehearsal(session, function)


def run_as_rehearsal(session: Session, function: Any) -> Record:
    with ExitStack() as stack:
        stack.enter_context(patched(session))
        wrapped = session.events.function.wrap(lambda: function, None, {}, stack)()
        record: Record = wrapped()
        return record


def rehearsed_apart(function: Any, **settings: Any) -> Record:
    """Rehearse in a process of its own, for changes that cannot be undone in one, such as compiling."""

    def rank(session: Session) -> Record:
        session.plan = dataclasses.replace(session.plan, rehearsal=Rehearsal(**settings))
        return run_as_rehearsal(session, function)

    record: Record = run_ranks(1, rank, patches=False)[0]
    return record


def told(record: Record) -> list[object]:
    """Return the recorded value, without kinds and places."""
    return [part for part in record.value if not isinstance(part, bytes)]


def sizes(loader: DataLoader[Any]) -> list[int]:
    return [len(batch[0]) for batch in loader]


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).reshape(count, 1))


def test_a_pass_has_the_first_batches_and_the_last(tmp_path: Path) -> None:
    def program() -> list[Any]:
        loader = DataLoader(numbers(103), batch_size=10)
        return [len(loader), *sizes(loader), *[float(batch[0].sum()) for batch in loader][-1:]]

    record = rehearsed(tmp_path, program, num_batches=4)
    assert told(record) == [4.0, 10.0, 10.0, 10.0, 3.0, 303.0]
    assert [batch.number for batch in record.batches] == [(0, n) for n in range(4)] + [(1, n) for n in range(4)]


def test_a_short_pass_and_an_endless_one_are_cut_alike(tmp_path: Path) -> None:
    class Endless(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            while True:
                yield torch.zeros(1)

    def program() -> list[int]:
        short = len(list(DataLoader(numbers(20), batch_size=10)))
        return [
            short,
            len(list(DataLoader(Endless(), batch_size=2))),
            len(list(DataLoader(Endless(), batch_size=None))),
        ]

    assert told(rehearsed(tmp_path, program, num_batches=4)) == [2.0, 4.0, 4.0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_workers_and_samplers_of_the_programs_own_are_cut_too(num_workers: int) -> None:
    def program() -> list[int]:
        sampler = BatchSampler(SequentialSampler(range(53)), 10, drop_last=True)
        return sizes(DataLoader(numbers(53), batch_sampler=sampler, num_workers=num_workers))

    assert told(rehearsed_apart(program, num_batches=3)) == [10.0, 10.0, 10.0]


def test_batches_of_a_group_are_one_for_one_process(tmp_path: Path) -> None:
    loader = DataLoader(numbers(53), batch_size=4)
    record = rehearsed(tmp_path, lambda: [len(loader), *sizes(loader)], num_batches=3, group_size=2)
    assert told(record) == [3.0, 8.0, 8.0, 5.0]


def steps(model: nn.Module, count: int) -> None:
    for _ in range(count):
        model.zero_grad()
        model(torch.ones(2, 3)).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.5)


def test_the_program_ends_before_one_backward_too_many_and_nothing_of_its_own_stops_that(tmp_path: Path) -> None:
    ended = []

    def program() -> None:
        try:
            steps(nn.Linear(3, 1), 10)
        except Exception:
            ended.append("swallowed")
        finally:
            ended.append("finally")

    record = rehearsed(tmp_path, program, num_backwards=4)
    assert len(record.steps) == 4
    assert (record.returned, ended) == (False, ["finally"])


@pytest.mark.parametrize(("slow", "num_backwards"), [(3, 8), (12, 24), (99, 64)])
def test_a_program_is_ended_by_the_clock_after_8_or_24_backwards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: int, num_backwards: int
) -> None:
    now = time.monotonic()

    def program() -> None:
        for count in range(100):
            if count == slow:  # which is the only time that passes
                monkeypatch.setattr(time, "monotonic", lambda: now + 1e6)
            steps(nn.Linear(3, 1), 1)

    assert len(rehearsed(tmp_path, program, seconds=1e5).steps) == num_backwards


def test_later_passes_are_shorter(tmp_path: Path) -> None:
    def program() -> list[int]:
        model, loader = nn.Linear(1, 1), DataLoader(numbers(103), batch_size=10)
        lengths = []
        for _ in range(4):
            lengths.append(len(loader))
            for (x,) in loader:
                model(x).mean().backward()
        return lengths

    record = rehearsed(tmp_path, program)
    assert told(record) == [8, 8, 2, 2]
    assert len(record.steps) == 20


@pytest.mark.parametrize("num_workers", [0, 1])
def test_passes_are_told_apart_and_their_ends_are_noted(num_workers: int) -> None:
    def program() -> None:
        model = nn.Linear(1, 1)
        loader = DataLoader(numbers(30), batch_size=10, num_workers=num_workers, persistent_workers=num_workers > 0)
        for (x,) in loader:
            model(x).mean().backward()
        next(iter(loader))
        list(loader)

    passes = rehearsed_apart(program).passes
    assert [(one.num_before, one.num_after) for one in passes] == [(0, 3), (3, None), (3, 3)]


def test_clocks_jump_for_the_program_alone(tmp_path: Path) -> None:
    looked: list[float] = []

    def program() -> Any:
        from timeit import default_timer

        looked.append(default_timer())
        times = [time.time(), time.time(), time.perf_counter(), time.monotonic_ns() / 1e9]
        looked.append(default_timer())
        dates = [time.strftime("%H:%M"), time.strftime("%H:%M"), time.ctime(), time.ctime()]
        assert time.gmtime(0).tm_year == 1970
        assert time.strftime("%Y", time.gmtime(0)) == "1970"
        return [times[1] - times[0] > 3600, dates[0] != dates[1], dates[2] != dates[3], time.localtime().tm_year > 2000]

    before = dict(vars(time))
    record = rehearsed(tmp_path, program, jumps=True)
    assert (record.error, told(record)) == ("", ["True"] * 4)
    assert looked[1] - looked[0] < 3600
    assert vars(time) == before


@pytest.mark.parametrize(("code", "returned"), [(None, True), (0, True), (3, False), ("no", False)])
def test_a_script_that_ends_by_exit_has_ended_as_it_should(tmp_path: Path, code: Any, returned: bool) -> None:
    record = rehearsed(tmp_path, lambda: sys.exit(code))
    assert (record.returned, bool(record.error)) == (returned, not returned)


def test_losses_gradients_and_movements_are_noted(tmp_path: Path) -> None:
    record = rehearsed(tmp_path, lambda: steps(nn.Linear(3, 1), 2))
    weight, bias = sorted(record.leaves.values(), key=lambda leaf: len(leaf.start), reverse=True)
    assert record.steps[0].loss - record.steps[1].loss == pytest.approx(0.5 * 4)
    assert sorted(record.steps[0].gradients.values()) == [(1.0,), (1.0, 1.0, 1.0)]
    assert [a - b for a, b in zip(weight.start, weight.end, strict=True)] == pytest.approx([1.0] * 3)
    assert bias.start[0] - bias.end[0] == pytest.approx(1.0)
    assert weight.is_parameter
    assert weight.epsilon == torch.finfo(torch.float32).eps


def test_autocast_makes_the_precision_its_own(tmp_path: Path) -> None:
    def program() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.Linear(3, 1)(torch.ones(2, 3)).mean()
        loss.backward()

    record = rehearsed(tmp_path, program)
    assert {leaf.epsilon for leaf in record.leaves.values()} == {torch.finfo(torch.bfloat16).eps}


def test_numbers_that_are_read_know_whether_they_decide(tmp_path: Path) -> None:
    def program() -> None:
        loss = torch.tensor(0.25)
        print(f"{loss.item():.2f}")
        total = 0.0
        total += 2 * loss.item()
        if total / 4 < 1:
            float(loss)
        if loss > 1:
            raise AssertionError
        torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], 0.1)).step(loss)

    reads = rehearsed(tmp_path, program).reads
    assert [read.value for read in reads] == [0.25] * 5
    assert [read.decides for read in reads] == [False, True, False, True, True]
    assert all(read.place.startswith("test_rehearsal.py:") for read in reads[:4])


def test_a_number_that_was_read_is_a_float_to_everyone_else(tmp_path: Path) -> None:
    def program() -> None:
        number = torch.tensor(0.5).item()
        assert isinstance(number, float)
        assert f"{number} {number:.1f} {number!r}" == "0.5 0.5 0.5"
        assert (number + 1, 1 - number, number**2, -number, abs(number), round(number, 1)) == (
            1.5,
            0.5,
            0.25,
            -0.5,
            0.5,
            0.5,
        )
        assert math.sqrt(number * 2) == 1
        assert {number: 1}[0.5] == 1
        assert torch.tensor([number]).sum().item() == 0.5
        file = io.BytesIO()
        torch.save({"loss": number}, file)
        file.seek(0)
        assert type(torch.load(file)["loss"]) is float

    assert rehearsed(tmp_path, program).error == ""


def test_reading_under_compile_works() -> None:
    def program() -> float:
        fast = torch.compile(lambda x: x * 2 if x.sum().item() > 0 else x, backend="eager")
        whole = torch.compile(lambda x: torch.where(x.sum() > 1, x, -x), backend="eager", fullgraph=True)
        return float(whole(fast(torch.ones(2))).sum())

    record = rehearsed_apart(program)
    assert (record.error, record.value) == ("", [4.0])


def test_what_is_printed_is_kept_and_not_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert rehearsed(tmp_path, lambda: print("a line")).printed == "a line\n"
    assert capfd.readouterr() == ("", "")


def test_the_exception_of_one_process_is_noted(tmp_path: Path) -> None:
    def program() -> None:
        raise KeyError("lr")

    record = rehearsed(tmp_path, program)
    assert (record.returned, record.error) == (False, "KeyError: 'lr'")


def test_pinned_samples_depend_on_their_index_alone_and_leave_the_generators(tmp_path: Path) -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(1)

    def program() -> list[float]:
        whole = torch.cat(list(DataLoader(Noisy(torch.zeros(6)), batch_size=6)))
        backwards = torch.cat(list(DataLoader(Noisy(torch.zeros(6)), batch_size=2, sampler=range(5, -1, -1))))
        assert torch.equal(whole, backwards.flip(0))
        assert len(whole.unique()) == 6
        before = torch.get_rng_state()
        dropped = nn.functional.dropout(torch.ones(50))
        assert torch.equal(before, torch.get_rng_state())
        return [float(dropped.sum())]

    assert told(rehearsed(tmp_path, program, pinned=True)) == [50.0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_within_a_recurrent_module_is_fixed_too(kind: Callable[..., nn.RNNBase], tmp_path: Path) -> None:
    def program() -> float:
        module = kind(3, 4, num_layers=2, dropout=0.5)
        before = torch.get_rng_state()
        dropped = module(torch.ones(5, 2, 3))[0]
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(dropped, module.eval()(torch.ones(5, 2, 3))[0])
        return module.dropout

    assert told(rehearsed(tmp_path, program, pinned=True)) == [0.5]


def test_a_sketch_of_a_difference_is_the_difference_of_sketches() -> None:
    left, right = torch.randn(3, 500, dtype=torch.float64), torch.randn(3, 500, dtype=torch.float64)
    between = [a - b for a, b in zip(sketch(left), sketch(right), strict=True)]
    assert between == pytest.approx(sketch(left - right))
    size = math.sqrt(sum(value * value for value in between))
    assert size == pytest.approx(float((left - right).norm()), rel=0.5)
    assert sketch(torch.arange(3)) == (0.0, 1.0, 2.0)
    assert len(sketch(torch.zeros(3, dtype=torch.complex64))) == 6
    changed = left.clone()
    changed[2, 77] += 1
    assert sketch(changed) != sketch(left)


def test_samples_have_digests_of_all_that_belongs_to_them() -> None:
    x, y = torch.rand(3, 2), torch.tensor([1, 2, 3])
    first, second, third = digests([x, y])
    assert len({first, second, third}) == 3
    assert digests({"x": x, "y": y})[0] == first
    assert digests((x[1:], y[1:])) == (second, third)
    assert digests([x, y.flip(0)])[1] == second
    assert digests([x, y.flip(0)])[0] != first
    assert len(digests("no tensor")) == 1


@pytest.mark.parametrize(
    "unusual",
    [
        torch.zeros(3, 0),
        torch.zeros(3, 2, dtype=torch.complex64).conj(),
        torch.zeros(3, 2, dtype=torch.complex64).conj().imag,
        torch.zeros(3, 2, device="meta"),
        torch.zeros(3, 2).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(1), torch.ones(0)], layout=torch.jagged),
    ],
    ids=["no columns", "conjugated", "negative", "meta", "sparse", "nested"],
)
def test_a_batch_may_hold_any_tensor(unusual: torch.Tensor, tmp_path: Path) -> None:
    y = torch.tensor([1, 2, 3])
    assert len(set(digests([y, unusual]))) == 3
    batches: Any = [(y, unusual)]
    record = rehearsed(tmp_path, lambda: len(list(DataLoader(batches, batch_size=None))))
    assert record.returned
    assert len(record.batches[0].rows) == 3
    assert pickle.loads(pickle.dumps(record)) == record


def test_a_batch_may_be_empty(tmp_path: Path) -> None:
    batches: Any = [torch.zeros(2, 4), torch.zeros(0, 4), torch.zeros(1, 4)]
    record = rehearsed(tmp_path, lambda: [len(batch) for batch in DataLoader(batches, batch_size=None)])
    assert told(record) == [2, 0, 1]
    assert [len(batch.rows) for batch in record.batches] == [2, 0, 1]


def test_any_value_is_flat() -> None:
    value = {"loss": 0.5, "on": True, "curve": [1, None], "model": nn.Linear(1, 1), "text": "t", "other": object()}
    found = flat(value)
    assert found[:9] == [
        b"builtins.dict of 6",
        b"['curve']",
        b"builtins.list of 2",
        b"['curve'][0]",
        1,
        b"['curve'][1]",
        "None",
        b"['loss']",
        0.5,
    ]
    assert b"torch.nn.modules.linear.Linear of 2" in found
    assert found[-2:] == [b"['text']", "t"]
