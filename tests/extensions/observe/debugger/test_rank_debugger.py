"""A person debugs a rank: the others wait, and the run ends as without a debugger."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import lagom
from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace, TorchDistributedConfig
from lagom.errors import LagomError, PlanError, RankError
from tests.extensions.observe.debugger.stopping_programs import Stopping, fails, train, where
from tests.person import Person, person

__all__ = ["person"]

NEVER_S = 100.0


def run(function: Callable[..., Any], **settings: Any) -> Any:
    settings = {"launcher": "local", "world_size": 2, "run_dir": None, "seed": 3, **settings}
    return experiment.lagom(function, TorchDistributedConfig(**settings))


@pytest.mark.parametrize("zero_lvl", [0, pytest.param(3, marks=pytest.mark.soak)])
def test_what_is_typed_in_a_loop_leaves_the_run_as_it_is(
    person: Person, zero_lvl: int, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = run(train, hparams={"place": "none"}, zero_lvl=zero_lvl)
    person.types("p tuple(inputs.shape)", "p torch.rand(3).shape", "p len(list(loader))", "n", "n", "c")
    person.types("p model(inputs).shape", "!print('printed', loss.item())", "c")
    person.types("interact", "x = 7", "x * 6", _end_of_input, "c", "c")
    result = run(train, hparams={"place": "loop"}, zero_lvl=zero_lvl)
    assert result.per_rank == plain.per_rank
    shown = capfd.readouterr()
    assert "rank 0 of 2 is in the debugger; the others wait at their next exchange" in shown.err
    assert "\n(128, 256)\ntorch.Size([3])\n4\n" in shown.out
    assert "-> optimizer.step()\n" in shown.out
    assert "printed 0." in shown.out
    assert "\n42\n" in shown.out
    assert zero_lvl or "torch.Size([128, 1])" in shown.out
    assert set(person.prompts) == {"(Pdb) ", ">>> "}


def _end_of_input() -> str:
    raise EOFError


def test_a_forward_that_ranks_share_stops_with_the_rows_of_its_rank(
    person: Person, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = run(train, hparams={"place": "none"})
    person.types("p tuple(x.shape), torch.rand(2).shape", "c", "p tuple(x.shape), self(x).shape", "w")
    person.types("c", "p y.max().item() > 0", "c", "c")
    assert run(train, hparams={"place": "forward"}).per_rank == plain.per_rank
    shown = capfd.readouterr().out
    assert shown.count("(this forward has 64 of the 128 rows of the batch)") == 3
    assert "((64, 256), torch.Size([64, 1]))" in shown
    assert "-> loss = nn.functional.mse_loss(model(inputs), targets)\n" in shown
    assert "lagom/forward/rows" not in shown


@pytest.mark.soak  # test_terminal.py shows by default that hosts are told of it
def test_no_rank_counts_as_stalled_while_a_person_thinks(person: Person, capfd: pytest.CaptureFixture[str]) -> None:
    def think() -> str:
        capfd.readouterr()  # a busy machine may have been slow until here
        time.sleep(8.0)
        return "c"

    person.types(think)
    assert run(fails, hparams={"ranks": (), "stops": True}, stall_timeout_s=3.0).per_rank == (0, 0)
    assert "no progress" not in capfd.readouterr().err


@pytest.mark.soak  # tests/extensions/observe/notebooks/test_debugger.py chooses a rank by default
def test_the_rank_that_is_chosen_stops(person: Person, capfd: pytest.CaptureFixture[str]) -> None:
    person.types("p lagom.rank() + 40", "c")
    assert run(where, debug=1).per_rank == (0, 1)
    shown = capfd.readouterr()
    assert "rank 1 of 2 is in the debugger" in shown.err
    assert "\n41\n" in shown.out


@pytest.mark.parametrize("line", ["q", *(pytest.param(one, marks=pytest.mark.soak) for one in ("exit", _end_of_input))])
def test_quitting_ends_the_run_in_one_line(person: Person, line: str | Callable[[], str]) -> None:
    person.types(line)
    with pytest.raises(
        LagomError, match=r"^the run was ended from the debugger, on rank 0 at stopping_programs.py:\d+, in where$"
    ):
        run(where)
    assert run(lagom.rank).per_rank == (0, 1)


@pytest.mark.parametrize(
    ("debug", "ranks"),
    [
        ("first", (0, 1)),
        *(pytest.param(*other, marks=pytest.mark.soak) for other in (("first", (1,)), (1, (0, 1)), (0, (0, 1)))),
    ],
)
def test_a_failure_is_looked_at_before_it_ends_the_run(
    person: Person, debug: Any, ranks: tuple[int, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    person.types("p 'secret', secret", "w", "c")
    with pytest.raises(KeyError, match="4") as caught:
        run(fails, hparams={"ranks": ranks}, debug=debug)
    shown = capfd.readouterr()
    rank = caught.value.args[0] - 40
    assert rank in ranks
    assert debug in ("first", rank)
    assert f"rank {rank} of 2 has failed, and is in the debugger" in shown.err
    assert f"KeyError: {40 + rank}\n> " in shown.out
    assert f"('secret', {40 + rank})\n> " in shown.out
    assert "lagom/" not in shown.out.replace("test_rank_debugger", "").replace(str(Path(__file__).parents[2]), "")


def test_another_rank_than_the_chosen_one_is_looked_at_if_only_that_fails(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lagom.extensions.observe.debugger.terminal.CHOSEN_S", 0.1)
    person.types("p secret", "q")
    with pytest.raises(KeyError, match="41"):
        run(fails, hparams={"ranks": (1,)}, debug=0)


def test_two_ranks_are_debugged_one_after_the_other(person: Person, capfd: pytest.CaptureFixture[str]) -> None:
    def slowly() -> str:
        time.sleep(0.5)  # for the other rank to come
        return "p 'first', secret"

    person.types(slowly, "p 'second', secret", "c", "p 'third', secret", "p 'fourth', secret", "c")
    with pytest.raises(KeyError, match="41"):
        run(fails, hparams={"ranks": (1,), "stops": True}, debug="first")
    shown = capfd.readouterr().out
    found = {word: shown[shown.index(f"('{word}', ") :][: len(word) + 8] for word in ("first", "second", "third")}
    ranks = {word: text[-3:-1] for word, text in found.items()}
    assert ranks["first"] == ranks["second"]
    assert {ranks["first"], ranks["third"]} == {"40", "41"}


def test_an_exception_without_a_debugger_ends_the_run(person: Person) -> None:
    with pytest.raises(KeyError):
        run(fails, hparams={"ranks": (0, 1)})
    assert person.prompts == []


def test_a_rank_that_is_killed_ends_its_prompt(person: Person, tmp_path: Path) -> None:
    def stop(folder: str) -> None:
        os.system(f"echo {os.getpid()} > {folder}/{lagom.rank()}")  # there at once, unlike what a rank writes itself
        breakpoint()

    def kill() -> str:
        os.kill(int((tmp_path / "0").read_text()), signal.SIGKILL)
        time.sleep(NEVER_S)
        return "c"

    person.types(kill)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0 was killed by SIGKILL"):
        run(stop, hparams={"folder": str(tmp_path)}, max_failures=0)
    assert time.monotonic() - start < NEVER_S / 2


def test_a_thread_of_the_program_stops_too(person: Person, capfd: pytest.CaptureFixture[str]) -> None:
    def start_thread() -> None:
        def work() -> None:
            secret = 43
            breakpoint()
            print("done", secret)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    person.types("p secret", "c")
    run(start_thread)
    assert "\n43\n" in capfd.readouterr().out


@pytest.mark.parametrize(  # a spawned worker imports torch
    ("context", "world_size"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.soak)]
)
def test_a_worker_of_a_loader_cannot_stop_and_says_so(person: Person, context: str, world_size: int) -> None:
    def load() -> None:
        for _ in DataLoader(Stopping(), batch_size=4, num_workers=1, multiprocessing_context=context):
            pass

    with pytest.raises(LagomError, match=r"breakpoint\(\) in process \d+, which a rank has started.*num_workers=0"):
        run(load, world_size=world_size)


def test_a_trial_of_a_search_cannot_stop_and_says_so(person: Person) -> None:
    def stop(x: float) -> float:
        breakpoint()
        return x

    config = HyperparameterOptConfig(
        searchspace=Searchspace(x=("DOUBLE", [0.0, 1.0])), num_trials=1, num_slots=1, launcher="local", run_dir=None
    )
    result = experiment.lagom(stop, config)
    assert "breakpoint() in a trial of a search" in result.trials[0]["error"]
    with pytest.raises(ValueError, match="debug is 'first', but several trials run at a time"):
        dataclasses.replace(config, debug="first")


@pytest.mark.soak
def test_a_rehearsal_passes_over_breakpoints(person: Person) -> None:
    person.types("c", "c", "c", "c")
    run(train, hparams={"place": "loop"}, verify=True)


def test_pdbs_own_call_stops_with_a_header(person: Person, capfd: pytest.CaptureFixture[str]) -> None:
    def stop() -> int:
        import pdb

        pdb.set_trace(header="look here")
        return 3

    person.types("b 999", "c")
    assert run(stop).per_rank == (3, 3)
    assert "look here\n> " in capfd.readouterr().out


def test_a_long_text_comes_whole(person: Person, capfd: pytest.CaptureFixture[str]) -> None:
    person.types("p '\N{SNOWMAN}' * 300_000", "c")
    run(where)
    assert capfd.readouterr().out.count("\N{SNOWMAN}") == 300_000


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"debug": 7}, PlanError, "debug is rank 7, but the run has 2 ranks"),
        ({"debug": 0, "launcher": "inline", "world_size": 1}, ValueError, "breakpoint.. and pdb.pm.. stop"),
    ],
)
def test_a_rank_that_is_not_there_is_an_error(
    person: Person, settings: Mapping[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        run(where, **settings)


def test_where_nobody_can_type_a_debugger_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    assert not sys.stdin.isatty()
    with pytest.raises(LagomError, match=r"^breakpoint\(\) on rank 0, and nobody can type at the driver"):
        run(where)
    with pytest.raises(ValueError, match="debug is 'first', but nobody can type at the driver"):
        run(where, debug="first")
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    assert run(where).per_rank == (0, 1)
