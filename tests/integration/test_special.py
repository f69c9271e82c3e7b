"""Spark out of the ordinary: dynamic allocation, GPUs, executors without torch; two runs at once; huge results."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lagom
import lagom.spark.spark
from lagom.errors import LagomError, PlanError, RankError
from tests.integration import clusters, programs


def on(kind: str) -> pytest.MarkDecorator:
    """Runs a test on that kind of Spark."""
    # One waits for executors to come and go; tests/spark/test_spark_gpus.py shows by default what the other does.
    marks = [pytest.mark.soak] if kind in ("dynamic", "gpus") else []
    return pytest.mark.parametrize("spark", [pytest.param(kind, marks=marks)], indirect=True, scope="session")


@on("dynamic")
def test_dynamic_allocation_has_ranks_without_a_barrier_stage(spark: Any) -> None:
    result = programs.run(programs.train, 2, module=programs.Net, train_set=programs.points())
    assert all(programs.same_weights(found, programs.plain_weights()) for found in result.per_rank)
    assert programs.run(programs.place).per_rank == ((0, 2), (1, 2))


@on("dynamic")
def test_slots_of_dynamic_allocation_are_counted_up_to_its_most(spark: Any) -> None:
    with pytest.raises(PlanError, match=r"has 2 task slots; ask for at most 2, or raise spark.dynamicAllocation.max"):
        programs.run(programs.nothing, 3)


@on("dynamic")
def test_spark_does_not_repeat_a_rank(spark: Any, tmp_path: Path) -> None:
    def count(folder: str) -> None:
        # By another program: the process that would bring home what rank 1 writes itself is killed.
        os.system(f"printf x >> {folder}/{lagom.rank()}")
        programs.kill_the_holder()

    with pytest.raises(LagomError, match="gone, perhaps killed"):
        programs.run(count, 2, hparams={"folder": str(tmp_path)})
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["x", "x"]
    with pytest.raises(programs.LateError, match="the disk is full"):
        programs.run(programs.raise_while_the_other_sleeps, 2)  # the workers of Spark were killed before, and are new
    assert programs.run(programs.place, 2).per_rank == ((0, 2), (1, 2))


@on("gpus")
def test_a_rank_without_cuda_says_what_to_install(spark: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here, but not those that Spark was told of")
    with pytest.raises(RankError, match=r"given a GPU, but torch .* finds none; install a CUDA build"):
        programs.run(programs.nothing)


@on("gpus")
def test_gpus_are_counted_as_slots(spark: Any) -> None:
    with pytest.raises(PlanError, match="world_size is 5, but Spark has 4 GPUs; ask for at most 4"):
        programs.run(programs.nothing, 5)


@on("gpus")
@pytest.mark.parametrize("mask", ["", "GPU-a,GPU-b,GPU-c"])
def test_ranks_of_a_task_get_gpus_of_their_own(spark: Any, mask: str) -> None:
    root = str(Path(lagom.__file__).parents[1])

    def masks(batches: Any) -> Any:
        import os
        import types

        import pyarrow

        sys.path.insert(0, root)
        os.environ["CUDA_VISIBLE_DEVICES"] = mask
        try:
            from pyspark import BarrierTaskContext

            from lagom.spark.spark_worker import gpus_of_task

            context: Any = BarrierTaskContext.get()
            plan = types.SimpleNamespace(gpu=True, ranks_per_slot=2)
            found = gpus_of_task(types.SimpleNamespace(plan=plan), context)  # type: ignore[arg-type]
        finally:
            del os.environ["CUDA_VISIBLE_DEVICES"]
            sys.path.remove(root)
        list(batches)
        yield pyarrow.RecordBatch.from_pydict({"gpus": [",".join(found)]})

    rows = spark.range(0, 2, 1, 2).mapInArrow(masks, "gpus string", barrier=True).collect()
    indices = {"0", "1"} if not mask else {"GPU-a", "GPU-b"}
    assert {name for row in rows for name in row["gpus"].split(",")} == indices | {"GPU-3c2b", "MIG-77aa"}


@pytest.mark.soak  # the test below has another Python that cannot serve by default
@on("local[2]")
@pytest.mark.usefixtures("torchless")
def test_an_executor_without_torch_says_where_to_install_it(spark: Any) -> None:
    with pytest.raises(
        LagomError, match=r"has no torch .* its Python is .*: install torch there, or set PYSPARK_PYTHON"
    ):
        programs.run(programs.nothing, 1)


@on("local[2]")
def test_another_version_of_python_is_named(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.python_version_tuple", lambda: ("3", "99", "0"))
    with pytest.raises(LagomError, match=r"the driver runs Python 3.99, this executor 3\.\d+; set PYSPARK_PYTHON"):
        programs.run(programs.nothing, 1)


@on("local[2]")
def test_lagom_travels_to_executors_that_have_none(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def where() -> tuple[str, str]:
        return sys.prefix, str(Path(lagom.__file__).parent)

    with clusters.bare_python() as python:
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
        found = programs.run(where, 2).per_rank
    assert all(prefix != sys.prefix and "/code-" in path for prefix, path in found)


@on("local[2]")
def test_tasks_run_the_drivers_python_where_nobody_named_one(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "python3")  # the first on the path, which is another
    assert programs.run(lambda: sys.executable, 2).per_rank == (sys.executable, sys.executable)
    assert spark.sparkContext.pythonExec == "python3"


@on("local[4]")
@pytest.mark.soak  # test_kinds.py shows it by default on two ranks
@pytest.mark.parametrize("world_size", [3, 4])
def test_weights_are_those_of_the_plain_run(spark: Any, world_size: int) -> None:
    result = programs.run(programs.train, world_size, module=programs.Net, train_set=programs.points())
    wanted = programs.plain_weights()
    assert all(programs.same_weights(found, wanted) for found in result.per_rank)


@pytest.mark.soak  # tests/driver/test_local.py shows it by default
@pytest.mark.parametrize(
    ("spark", "world_size"), [("local[2]", 1), ("local[4]", 2)], indirect=["spark"], scope="session"
)
def test_two_threads_run_at_the_same_time(spark: Any, world_size: int, tmp_path: Path) -> None:
    def wait_for_the_other(name: str, other: str, folder: str) -> str:
        os.system(f"touch {folder}/{name}{lagom.rank()}")  # on the real disk, where the other run sees it
        deadline = time.monotonic() + 30
        while not Path(folder, f"{other}{lagom.rank()}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return f"{name}{lagom.rank()}"

    results = {}

    def call(name: str, other: str) -> None:
        hparams = {"name": name, "other": other, "folder": str(tmp_path)}
        results[name] = programs.run(wait_for_the_other, world_size, hparams=hparams).per_rank

    threads = [threading.Thread(target=call, args=names) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: tuple(f"{name}{rank}" for rank in range(world_size)) for name in "ab"}


@on("local[2]")
def test_the_job_group_of_the_user_stays(spark: Any) -> None:
    spark.sparkContext.setJobGroup("mine", "my jobs")
    programs.run(programs.nothing, 2)
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") == "mine"
    assert spark.range(3).count() == 3


@on("local[4]")
@pytest.mark.soak
def test_a_result_above_2_gb_comes_home(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> torch.Tensor:
        return torch.full((2_400_000_000 // 8,), float(lagom.rank()), dtype=torch.float64)

    start = time.perf_counter()
    result = programs.run(make, 2)
    assert [float(value[::1000].mean()) for value in result.per_rank] == [0.0, 1.0]
    with capsys.disabled():
        print(f"\ntwo results of 2.4 GB: {time.perf_counter() - start:.1f} s")


@on("standalone")
@pytest.mark.soak  # tests/spark/test_spark.py shows it by default
def test_an_executor_that_is_lost_is_awaited(spark: Any) -> None:
    programs.run(programs.nothing, 2)
    own = f"--app-id {spark.sparkContext.applicationId} "
    commands = {pid: _command(pid) for pid in os.listdir("/proc") if pid.isdigit()}
    executors = [int(pid) for pid, command in commands.items() if own in command and "ExecutorBackend" in command]
    os.kill(executors[0], signal.SIGKILL)
    deadline = time.monotonic() + 20
    while spark.sparkContext._jsc.sc().getExecutorIds().size() > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert programs.run(programs.place, 2).per_rank == ((0, 2), (1, 2))


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.mark.soak
@on("local[2]")
def test_tasks_of_an_executor_share_what_was_imported_once_and_keep_it_after_a_failure(spark: Any) -> None:
    def server(fails: bool) -> int:
        if fails:
            raise ValueError("as it is asked to")
        return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])

    (before,) = set(programs.run(server, hparams={"fails": False}).per_rank)
    with pytest.raises(ValueError, match="as it is asked to"):
        programs.run(server, hparams={"fails": True})
    assert set(programs.run(server, hparams={"fails": False}).per_rank) == {before}
