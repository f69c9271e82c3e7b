"""``Study``: what becomes of trials is kept in a journal, from which a search goes on."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest

from lagom.errors import LagomError
from lagom.extensions.search.study import Study
from lagom.extensions.search.trial_source import TrialOutcome
from tests.extensions.search.searching import LISTS, run, search, small


def test_reports_of_one_step_count_once() -> None:
    study = Study(small(es_policy=optuna.pruners.ThresholdPruner(upper=1)))
    spec = study.ask()
    assert spec is not None
    assert [study.report(spec.number, 0, value) for value in (0.5, 2.0)] == [False, False]
    assert study.report(spec.number, 1, 2.0)
    study.tell(spec.number, TrialOutcome(state="pruned", value=2.0))
    assert study.optuna.trials[0].intermediate_values == {0: 0.5, 1: 2.0}
    assert (study.trials()[0]["state"], study.trials()[0]["value"]) == ("pruned", 2.0)


@pytest.fixture
def open_study() -> Iterator[Callable[..., Study]]:
    """Makes studies in folders, and closes them."""
    with contextlib.ExitStack() as stack:
        yield lambda folder, **fields: stack.enter_context(contextlib.closing(Study(small(**fields), folder)))


def test_what_became_of_a_trial_is_kept(tmp_path: Path, open_study: Callable[..., Study]) -> None:
    study = open_study(tmp_path, num_trials=3)
    outcomes = [
        TrialOutcome(state="complete", value=1.5, seconds=2.0, slot=1, returned={"a": [1]}, folder=tmp_path / "0000"),
        TrialOutcome(state="failed", error="ValueError: no", traceback="Traceback", seconds=1.0),
        TrialOutcome(state="complete", value=2.5, returned=object(), folder=Path("/elsewhere")),
    ]
    for outcome in outcomes:
        spec = study.ask()
        assert spec is not None
        study.tell(spec.number, outcome)
    assert study.finished
    assert study.ask() is None
    first, second, third = study.trials()
    assert {name: first[name] for name in ("state", "value", "seconds", "slot", "error")} == {
        "state": "complete",
        "value": 1.5,
        "seconds": 2.0,
        "slot": 1,
        "error": "",
    }
    assert (first["returned"], first["folder"]) == ({"a": [1]}, tmp_path / "0000")
    assert (second["state"], second["error"], second["traceback"]) == ("failed", "ValueError: no", "Traceback")
    assert (third["returned"], third["folder"]) == (None, Path("/elsewhere"))
    study.close()
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    again = open_study(moved, num_trials=3)
    assert again.finished
    assert again.trials()[0] == first | {"folder": moved / "0000"}


def test_a_killed_driver_loses_no_trial(tmp_path: Path, open_study: Callable[..., Study]) -> None:
    study = open_study(tmp_path, num_trials=6)
    specs = [spec for spec in (study.ask() for _ in range(3)) if spec is not None]
    assert study.report(specs[2].number, 0, 0.25) is False
    run(study, specs[0])
    with (tmp_path / "study.journal").open("ab") as journal:
        journal.write(b'{"op_code": 5, "wor')  # it was killed as it wrote
    again = open_study(tmp_path, num_trials=6)
    tried = [spec for spec in (again.ask(), again.ask()) if spec is not None]
    assert [(each.number, each.params) for each in tried] == [(each.number, each.params) for each in specs[1:]]
    fresh = again.ask()
    assert fresh is not None
    assert fresh.number == 3
    assert fresh.params not in [each.params for each in specs]  # the seed does not repeat its trials
    for each in (*tried, fresh):
        run(again, each)
    assert not again.finished
    assert again.optuna.trials[2].intermediate_values[0] == 0.25
    while (spec := again.ask()) is not None:
        run(again, spec)
    assert [each["number"] for each in again.trials()] == list(range(6))
    again.close()
    read = optuna.load_study(
        study_name=None,
        storage=optuna.storages.JournalStorage(
            optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
        ),
    )
    assert len(read.trials) == 6


def test_a_search_goes_on_with_the_same_question_alone(tmp_path: Path) -> None:
    search(small(), tmp_path).close()
    for other in (small(direction="min"), small(searchspace=LISTS)):
        with pytest.raises(LagomError, match="the search to resume had"):
            Study(other, tmp_path)
    more = search(small(num_trials=6), tmp_path)
    more.close()
    assert len(more.trials()) == 6


def test_a_search_by_distributions_goes_on_with_the_same_ones_alone(tmp_path: Path) -> None:
    lr = optuna.distributions.FloatDistribution(0, 1)
    search(small(searchspace={"lr": lr}), tmp_path).close()
    with pytest.raises(LagomError, match="the search to resume had searchspace="):
        Study(small(searchspace={"lr": optuna.distributions.FloatDistribution(0, 100)}), tmp_path)
    Study(small(searchspace={"lr": lr}), tmp_path).close()


def test_a_search_that_goes_on_with_other_hparams_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    search(small(hparams={"epochs": 3}), tmp_path).close()
    Study(small(hparams={"epochs": 3}), tmp_path).close()
    assert not caplog.messages
    Study(small(hparams={"epochs": 9}), tmp_path).close()
    assert "had hparams={'epochs': 3}, and now has {'epochs': 9}" in caplog.text


def _open(folder: Path) -> str:
    try:
        Study(small(), folder).close()
    except LagomError as error:
        return str(error)
    return "opened"


def test_two_processes_do_not_run_one_search(tmp_path: Path) -> None:
    study = Study(small(), tmp_path)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert "still running" in pool.apply(_open, (tmp_path,))
        study.close()
        assert pool.apply(_open, (tmp_path,)) == "opened"


def test_time_ends_a_search() -> None:
    study = Study(small(num_trials=None, timeout_s=0.05))
    spec = study.ask()
    assert spec is not None
    time.sleep(0.06)
    assert study.finished
    assert study.ask() is None
    run(study, spec)
    assert len(study.trials()) == 1


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    for library, remedy, optimizer in (("optuna", r"lagom-spark\[search\]", "tpe"), ("scipy", "install scipy", "gp")):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, hidden=library: None if name == hidden else find(name)
        )
        with pytest.raises(LagomError, match=remedy):
            Study(small(optimizer=optimizer))


def test_optunas_settings_are_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    before = optuna.logging.get_verbosity()
    search(small())
    assert optuna.logging.get_verbosity() == before
    assert capfd.readouterr().err == ""
