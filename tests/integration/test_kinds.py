"""A run on every kind of Spark, as its user sees it."""

from __future__ import annotations

import gc
import os
import statistics
import time
from typing import Any

import pytest
import torch

from tests.integration import programs

pytestmark = pytest.mark.parametrize(
    "spark", ["local[2]", "local-cluster", "standalone", "connect"], indirect=True, scope="session"
)


@pytest.mark.soak_on("connect")
@pytest.mark.parametrize("world_size", [*(pytest.param(size, marks=pytest.mark.soak) for size in (1, 2)), None])
def test_every_rank_knows_its_place(spark: Any, world_size: int | None) -> None:
    result = programs.run(programs.place, world_size)
    wanted = world_size or 2
    assert result.per_rank == tuple((rank, wanted) for rank in range(wanted))
    assert result.value == (0, wanted)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_weights_are_those_of_the_plain_run(spark: Any, world_size: int) -> None:
    result = programs.run(programs.train, world_size, module=programs.Net, train_set=programs.points())
    wanted = programs.plain_weights()
    assert all(programs.same_weights(found, wanted) for found in result.per_rank)


@pytest.mark.soak  # tests/driver/test_local.py shows it by default
def test_output_of_rank_0_is_shown_as_written(spark: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        import sys

        import lagom

        print(f"grüße from rank {lagom.rank()}")
        print("to stderr", file=sys.stderr)

    programs.run(speak, 2)
    shown = capfd.readouterr()
    assert shown.out == "grüße from rank 0\n"
    assert "to stderr\n" in shown.err


@pytest.mark.soak  # tests/driver/test_local.py shows it by default
def test_no_libraries_of_torchrun_see_a_rank(spark: Any) -> None:
    def variables() -> list[str]:
        shown = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ]
        return [*shown, str(torch.distributed.is_initialized())]

    assert programs.run(variables, 2).value == ["False"]


@pytest.mark.soak_on("connect")
def test_the_environment_of_the_program_follows_it(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_TEST_TOKEN", "secret")
    assert programs.run(lambda: os.environ["LAGOM_TEST_TOKEN"], 2).value == "secret"


@pytest.mark.soak_on("connect")
@pytest.mark.parametrize("megabytes", [pytest.param(1, marks=pytest.mark.soak), 20])
def test_a_large_result_comes_home(spark: Any, megabytes: int) -> None:
    def make() -> torch.Tensor:
        return torch.full((megabytes << 17,), 1.5, dtype=torch.float64)

    result = programs.run(make, 2)
    assert torch.equal(result.value, make())
    result.value[0] = 2.0


@pytest.mark.soak_on("connect")
def test_large_data_arrives(spark: Any) -> None:
    data = torch.arange(1 << 20, dtype=torch.float64)

    def total(train_set: torch.Tensor) -> float:
        return float(train_set.sum())

    assert programs.run(total, 2, train_set=data).value == float(data.sum())


@pytest.mark.soak  # tests/driver/test_local.py shows it by default
def test_calls_leave_no_file_open(spark: Any) -> None:
    def num_open() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    programs.run(programs.nothing, 2)
    before = num_open()
    programs.run(lambda: torch.zeros(1 << 18), 2)
    with pytest.raises(ValueError, match="no"):
        programs.run(programs.fail_with_a_large_error, 2)
    assert num_open() <= before


@pytest.mark.soak
@pytest.mark.latency
def test_warm_time(spark: Any, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    programs.run(programs.nothing, 2)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        programs.run(programs.nothing, 2)
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 3
    with capsys.disabled():
        kind = request.node.callspec.params["spark"]
        print(f"\nno-op on 2 ranks, {kind}: median {statistics.median(times):.3f} s of {[round(t, 3) for t in times]}")
