"""Searches on Spark: one job holds the slots, a lost executor loses its trials only, and they run again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace
from lagom.errors import PlanError
from lagom.spark.spark_session import ClassicFacts
from tests.extensions.search import odd_trials
from tests.extensions.search.search_process import start, wait_for_trials
from tests.integration import clusters, programs
from tests.integration.test_attempts import executor_of

SPACE = Searchspace(width=("DISCRETE", [1, 2, 3, 4, 5, 6]))


def search(train: Any, tmp_path: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"searchspace": SPACE, "optimizer": "grid", "direction": "min", "launcher": "spark"}
    settings |= {"optimization_key": "loss", "run_dir": tmp_path / "runs", "seed": 1, "es_policy": "none"}
    return experiment.lagom(train, HyperparameterOptConfig(**settings | changes))


def values(result: Any) -> dict[int, Any]:
    return {trial["params"]["width"]: trial["value"] for trial in result.trials}


@pytest.mark.parametrize(
    "spark", ["local[2]", "local-cluster", "standalone", "connect"], indirect=True, scope="session"
)
@pytest.mark.soak_on("connect")
class TestOnEveryKind:
    """Searches on every kind of Spark."""

    def test_trials_run_in_the_tasks_and_their_files_come_home(
        self, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)

        def train(width: int) -> dict[str, float]:
            Path("model.txt").write_text(f"width {width}")
            print("trained", width)
            return {"loss": (width - 4) ** 2}

        result = search(train, tmp_path)
        assert values(result) == {width: (width - 4.0) ** 2 for width in range(1, 7)}
        assert result.best_config == {"width": 4}
        assert Path("model.txt").read_text() == "width 4"
        for trial in result.trials:
            width = trial["params"]["width"]
            assert (trial["folder"] / "files/model.txt").read_text() == f"width {width}"
            assert (trial["folder"] / "output.txt").read_text() == f"trained {width}\n"

    @pytest.mark.soak  # tests/extensions/search/test_trial_loop.py shows each way by default on slots of this machine
    def test_trials_end_in_every_way(self, spark: Any, tmp_path: Path) -> None:
        odd_trials.check(odd_trials.search("spark", tmp_path / "runs"))


@pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
def test_the_time_of_writing_a_dataframe_is_a_part_of_a_search(spark: Any, tmp_path: Path) -> None:
    def train(train_set: Any, width: int) -> float:
        return float(width * len(train_set))

    frame = spark.range(6)
    result = search(train, tmp_path, train_set=frame, searchspace=Searchspace(width=("DISCRETE", [2])))
    assert result.best_value == 12.0
    assert list(result.timings) == ["prepare", "frame", "slots", "trials", "collect"]
    assert sum(result.timings.values()) == pytest.approx(result.seconds)


@pytest.mark.soak  # tests/extensions/search/test_mlflow_trials.py shows the same by default on slots of this machine
@pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
def test_trials_log_to_their_runs_in_mlflow(spark: Any, tmp_path: Path) -> None:
    from tests.extensions.search import mlflow_searches

    with mlflow_searches.store(tmp_path):
        mlflow_searches.check_runs_below_the_active_one("spark")


@pytest.mark.soak
@pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
def test_the_end_of_a_search_leaves_sparks_python_workers(spark: Any, tmp_path: Path) -> None:
    def train(width: int) -> dict[str, Any]:
        return {"loss": width, "workers": programs.workers_of_spark()}

    first, second = (search(train, tmp_path).trials[-1]["returned"]["workers"] for _ in range(2))
    assert len(first) == 2
    assert set(first) <= set(second)


@pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
@pytest.mark.parametrize("when", ["as its thread starts", "as its thread has begun"])
def test_ctrl_c_before_spark_has_the_job_leaves_no_job(
    spark: Any, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    map_tasks, thread_class = ClassicFacts.map_tasks, ClassicFacts.thread_class

    def train(width: int) -> float:
        time.sleep(60)
        return float(width)

    def map_late(facts: ClassicFacts, *args: Any) -> Any:
        if when == "as its thread has begun":
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2.0)
        return map_tasks(facts, *args)

    def interrupted_class(facts: ClassicFacts) -> Any:
        class Interrupted(thread_class(facts)):  # type: ignore[misc]  # which class it is depends on PySpark
            def start(self) -> None:
                super().start()
                if when == "as its thread starts":
                    os.kill(os.getpid(), signal.SIGINT)

        return Interrupted

    with monkeypatch.context() as changed:
        changed.setattr(ClassicFacts, "map_tasks", map_late)
        changed.setattr(ClassicFacts, "thread_class", interrupted_class)
        result = search(train, tmp_path)
    assert (result.interrupted, result.trials) == (True, [])
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()


@pytest.mark.soak
@pytest.mark.parametrize("spark", ["dynamic"], indirect=True, scope="session")
def test_slots_of_executors_that_come_later_are_used(spark: Any, tmp_path: Path) -> None:
    def train(width: int) -> float:
        time.sleep(5.0)  # for the second executor to come
        return float(width)

    result = search(train, tmp_path)
    assert values(result) == {width: float(width) for width in range(1, 7)}
    assert {trial["slot"] for trial in result.trials} == {0, 1}


@pytest.mark.soak  # tests/extensions/search/test_reports.py has such trials by default
@pytest.mark.parametrize(("spark", "tasks"), [("local[2]", 2), ("local[4]", 4)], indirect=["spark"], scope="session")
def test_a_trial_of_several_ranks_takes_as_many_tasks(spark: Any, tasks: int, tmp_path: Path) -> None:
    def train(width: int) -> dict[str, Any]:
        import lagom

        return {"loss": float(width), "world": lagom.world_size()}

    result = search(train, tmp_path, ranks_per_trial=2)
    assert values(result) == {width: float(width) for width in range(1, 7)}
    assert {trial["returned"]["world"] for trial in result.trials} == {2}
    assert len({trial["slot"] for trial in result.trials}) <= tasks // 2
    with pytest.raises(PlanError, match=f"{tasks} task slots"):
        search(train, tmp_path, ranks_per_trial=tasks + 1)
    assert programs.run(programs.place, 2).per_rank == ((0, 2), (1, 2))


@pytest.mark.soak  # tests/extensions/search/test_trial_loop.py shows by default that those of a lost slot do
@pytest.mark.parametrize("spark", ["standalone"], indirect=True, scope="session")
def test_trials_of_a_lost_executor_run_again(spark: Any, tmp_path: Path) -> None:
    marker = Path(f"/dev/shm/lagom-test-{os.getpid()}")  # devices are real for every trial

    def train(width: int) -> float:
        if width == 3 and not marker.exists():
            marker.touch()
            os.kill(executor_of(os.getpid()), signal.SIGKILL)
            time.sleep(60)
        return float(width)

    try:
        result = search(train, tmp_path)
    finally:
        marker.unlink()
    assert values(result) == {width: float(width) for width in range(1, 7)}


@pytest.mark.soak  # tests/extensions/search/test_search.py shows both; the tests above, what differs on Spark
def test_a_search_whose_driver_is_killed_goes_on_and_ctrl_c_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not clusters.java():
        pytest.skip("no Java here")
    monkeypatch.chdir(tmp_path)
    program = start(0.5, 500, launcher="spark")
    folder = wait_for_trials(6)
    program.kill()
    program.communicate()
    ended = [trial for trial in trials_of(folder) if trial.state.is_finished()]
    begun = len(trials_of(folder))
    assert 1 <= len(ended) < begun
    program = start("0.02 if x < 0.7 else 600", 500, str(folder), launcher="spark")  # soon, both tasks sleep
    wait_for_trials(begun + 4)
    program.send_signal(signal.SIGINT)
    out, errors = program.communicate(timeout=60)
    assert program.returncode == 0, errors
    interrupted, trials = json.loads(out)
    assert interrupted
    assert {number: (state, value) for number, state, value in trials}.items() >= {
        trial.number: ("complete", trial.value) for trial in ended
    }.items()
    assert len(trials) > len(ended)
    assert {state for _, state, _ in trials} == {"complete"}


def trials_of(folder: Path) -> list[Any]:
    """Return the trials in the journal of a search, as Optuna reads them."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    return storage.get_all_trials(storage.get_all_studies()[0]._study_id)


@pytest.mark.soak  # tests/extensions/search/slots and test_trial_loop.py have the parts by default
@pytest.mark.parametrize("spark", ["elastic"], indirect=True, scope="session")
def test_a_search_has_spark_allocate_executors_and_gives_them_back_before_its_last_trial_ends(
    spark: Any, tmp_path: Path
) -> None:
    executors = spark.sparkContext._jsc.sc().getExecutorIds
    seen, over = set[int](), threading.Event()
    final, given_back = tmp_path / "final", tmp_path / "given back"

    def look() -> None:
        while not over.wait(0.1):
            seen.add(now := executors().size())
            if final.exists() and 2 in seen and now < 2:
                given_back.touch()

    def train(width: int, folder: str) -> float:
        if width == 6:
            os.system(f"touch '{folder}/final'")  # by another program, on the real disk
            deadline = time.monotonic() + 100
            while not Path(folder, "given back").exists():
                assert time.monotonic() < deadline, "both executors are still there"
                time.sleep(0.1)
        else:
            time.sleep(3)
        return float(width)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        result = search(train, tmp_path, hparams={"folder": str(tmp_path)})
    finally:
        over.set()
        watcher.join()
    assert values(result) == {width: float(width) for width in range(1, 7)}
    assert 2 in seen
    assert max(seen) == 2
