"""Two hosts that share neither files nor processes nor addresses with the driver's, and have no lagom."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import lagom
from lagom.errors import RankError
from lagom.watch.progress import Progress
from tests.integration import programs

pytestmark = pytest.mark.parametrize("spark", ["foreign", "foreign-encrypted"], indirect=True, scope="session")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that come back are put where the driver stands."""
    monkeypatch.chdir(tmp_path)


def test_ranks_stand_on_other_hosts_with_the_lagom_that_travelled(spark: Any) -> None:
    def where() -> tuple[str, str, bool]:
        import importlib.util

        installed = [path for path in sys.path if "/code-" not in path and Path(path, "lagom", "__init__.py").exists()]
        assert importlib.util.find_spec("pyspark") is not None
        return socket.gethostname(), str(Path(lagom.__file__).parent), bool(installed)

    found = programs.run(where, 3).per_rank
    assert len({host for host, _, _ in found} - {socket.gethostname()}) == 2
    assert all("/code-" in path and not installed for _, path, installed in found)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_are_those_of_the_plain_run(spark: Any, world_size: int) -> None:
    result = programs.run(programs.train, world_size, module=programs.Net, train_set=programs.points())
    wanted = programs.plain_weights()
    assert all(programs.same_weights(found, wanted) for found in result.per_rank)


def test_large_gradients_are_summed_within_hosts_and_then_between_them(spark: Any) -> None:
    def train() -> tuple[dict[str, Any], bool]:
        import gc

        from lagom.exchange.group import Group

        torch.manual_seed(0)
        model = torch.nn.Linear(600, 600).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn(12, 600).double(), torch.randn(12, 600).double())
        for x, y in torch.utils.data.DataLoader(data, batch_size=6):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        spread = any(one.sums_itself and not one.shares_memory for one in gc.get_objects() if type(one) is Group)
        return model.state_dict(), spread

    wanted, _ = train()
    for weights, spread in programs.run(train, 3).per_rank:
        assert spread
        assert programs.same_weights(weights, wanted)


def test_spark_brings_large_data_to_the_hosts(spark: Any, connections: list[str]) -> None:
    data = torch.arange(50 << 17, dtype=torch.float64)

    def total(train_set: torch.Tensor) -> tuple[float, str]:
        return float(train_set.sum()), socket.gethostname()

    found = programs.run(total, 3, train_set=data).per_rank
    assert {value for value, _ in found} == {float(data.sum())}
    assert len({host for _, host in found}) == 2
    assert "fetch" not in connections


def test_large_results_are_delivered_beside_the_job(spark: Any, connections: list[str]) -> None:
    def make() -> torch.Tensor:
        return torch.full((10 << 17,), float(lagom.rank()), dtype=torch.float64)

    result = programs.run(make, 3)
    assert [float(value.sum()) for value in result.per_rank] == [0.0, 10 << 17, 20 << 17]
    assert sorted(connections) == [f"deliver outcome-{rank}" for rank in range(3)]


def test_relative_files_of_rank_0_come_back_and_do_not_leave_the_drivers_folder(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write() -> list[str]:
        Path("models/best").mkdir(parents=True, exist_ok=True)
        torch.save(torch.arange(3), "models/best/weights.pt")
        Path(f"rank{lagom.rank()}.txt").write_text("here")
        if lagom.rank() == 0:
            Path("outside").symlink_to("/etc/passwd")
        return sorted(os.listdir("."))

    programs.run(write, 3)
    assert torch.equal(torch.load(tmp_path / "models/best/weights.pt"), torch.arange(3))
    assert (tmp_path / "rank0.txt").read_text() == "here"
    assert "outside" in caplog.text
    assert not (tmp_path / "outside").is_symlink()


@pytest.mark.parametrize("fails", [0, 2])
def test_relative_files_come_back_of_a_run_that_failed(spark: Any, fails: int, tmp_path: Path) -> None:
    def write(fails: int) -> None:
        if lagom.rank() == 0:
            Path("log").mkdir()
            Path("log/steps.txt").write_text("1 2 3")
        torch.save(lagom.rank(), "checkpoint.pt")
        if lagom.rank() == fails:
            time.sleep(0.5)
            raise ValueError("after the checkpoint")
        if fails != 0:
            time.sleep(60)

    with pytest.raises(ValueError, match="after the checkpoint"):
        programs.run(write, 3, hparams={"fails": fails})
    assert (tmp_path / "log/steps.txt").read_text() == "1 2 3"


def test_modules_beside_the_program_travel_and_edits_are_seen(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "top_module.py").write_text("VALUE = 1\n")
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package/__init__.py").write_text("from late_package.inner import VALUE\n")
    (tmp_path / "late_package/inner.py").write_text("VALUE = 10\n")
    spec = importlib.util.find_spec("top_module")
    assert spec is not None
    import top_module  # type: ignore[import-not-found]

    def total() -> int:
        import late_package  # type: ignore[import-not-found]

        return int(top_module.VALUE + late_package.VALUE)

    try:
        assert programs.run(total, 3).value == 11
        (tmp_path / "top_module.py").write_text("VALUE = 2\n")
        (tmp_path / "late_package/inner.py").write_text("VALUE = 20\n")
        assert programs.run(total, 3).value == 22
    finally:
        del sys.modules["top_module"]


@pytest.mark.soak  # tests/integration/test_failing.py shows it by default
def test_error_names_rank_and_line_of_another_host(spark: Any) -> None:
    with pytest.raises(programs.LateError, match="the disk is full") as caught:
        programs.run(programs.raise_while_the_other_sleeps, 3)
    assert 'raise LateError("the disk is full", time.time())' in str(caught.value.__cause__)


@pytest.mark.soak  # tests/driver/test_run.py shows it by default
@pytest.mark.timeout(400)
def test_a_host_that_is_cut_off_is_named_within_5_s_and_ends_the_run(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(folder: str) -> None:
        if lagom.rank() == 2:
            time.sleep(1)
            os.system(f"date +%s.%N > {folder}/at && ip link set eth0 down")
        time.sleep(100)

    said: list[tuple[float, str]] = []
    monkeypatch.setattr(Progress, "warn", lambda self, text: said.append((time.time(), text)))
    with pytest.raises(
        RankError, match=r"no sign of life came for 20 s from the machine that held rank \d on lgh"
    ) as caught:
        programs.run(cut_off, 3, hparams={"folder": str(tmp_path)})
    ended_at, cut_at = time.time(), float((tmp_path / "at").read_text())
    warned_at, text = said[0]
    named = re.search(r"from the machine that holds rank (\d) on (lgh\w+): it is down, or cut off", text)
    assert named is not None
    subprocess.run(["ip", "-n", named[2], "link", "set", "eth0", "up"], check=True)
    assert warned_at - cut_at < 5
    assert ended_at - cut_at < 40
    assert caught.value.rank is not None
