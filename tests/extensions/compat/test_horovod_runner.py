"""Functions written for Horovod, by ``HorovodRunner`` and ``run``: how they get on the ranks, and what comes back."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lagom.extensions.compat.horovod
from lagom import experiment
from lagom.compat.horovod import HorovodRunner, run
from lagom.config import TorchDistributedConfig
from lagom.extensions.compat.compatible import compatible
from lagom.extensions.compat.horovod import horovod_modules
from lagom.program.detect_distributed import is_distributed
from tests.imported_once import imported_once  # noqa: F401

hvd: Any = importlib.import_module("lagom.extensions.compat.horovod.torch")
X = torch.randn(22, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)


@pytest.fixture(autouse=True)
def finders() -> Iterator[None]:
    """Undo a test's changes to imports."""
    lagom.extensions.compat.horovod.install()
    yield
    lagom.extensions.compat.horovod.remove()


def train_hvd(learning_rate: float, epochs: int = 2) -> tuple[int, list[float], list[float]]:
    """A Horovod program: a sampler of its own, BatchNorm and dropout that are the rank's own."""
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
    data = TensorDataset(X, Y)
    sampler: Any = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), seed=5)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    seen = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            seen += x[:, 0].tolist()
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return hvd.rank(), seen, torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()


def by_hand(learning_rate: float, size: int, epochs: int = 2) -> tuple[list[list[float]], list[float]]:
    """Train in one process: a copy of the model for each rank, and means of their gradients."""
    models = []
    for _ in range(size):
        torch.manual_seed(3)
        layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
        models.append(torch.nn.Sequential(*layers).double())
    data = TensorDataset(X, Y)
    samplers: list[Any] = [DistributedSampler(data, num_replicas=size, rank=rank, seed=5) for rank in range(size)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=learning_rate * size, momentum=0.9) for each in models]
    seen: list[list[float]] = [[] for _ in range(size)]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for batches in zip(*(DataLoader(data, batch_size=4, sampler=one) for one in samplers), strict=True):
            for rank, (x, y) in enumerate(batches):
                seen[rank] += x[:, 0].tolist()
                optimizers[rank].zero_grad()
                torch.nn.functional.mse_loss(models[rank](x), y).backward()
            for same in zip(*(each.parameters() for each in models), strict=True):
                mean = torch.stack([one.grad for one in same if one.grad is not None]).mean(0)
                for one in same:
                    one.grad = mean.clone()
            for optimizer in optimizers:
                optimizer.step()
    return seen, torch.cat([one.detach().flatten() for one in models[0].parameters()]).tolist()


def test_the_program_does_its_own_sharding_and_rank_0s_value_comes_back() -> None:
    seen, weights = by_hand(0.01, 2)
    rank, found_seen, found = HorovodRunner(np=-2).run(train_hvd, learning_rate=0.01)
    assert rank == 0
    assert found_seen == seen[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(weights), rtol=1e-12, atol=1e-13)
    (alone_seen,), alone = by_hand(0.01, 1)
    rank, found_seen, found = HorovodRunner(np=-1).run(train_hvd, learning_rate=0.01)
    assert (rank, found_seen) == (0, alone_seen)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), rtol=1e-12, atol=1e-13)


def test_run_returns_what_every_rank_returned_in_order(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(factor: int, more: int = 0) -> tuple[int, int, str]:
        hvd.init()  # a global of the caller's, as in a notebook
        return factor * hvd.rank() + more, hvd.size(), os.environ["OF_THE_RUN"]

    assert run(function, (10,), {"more": 1}, num_proc=3, env={"OF_THE_RUN": "x"}) == [
        (1, 3, "x"),
        (11, 3, "x"),
        (21, 3, "x"),
    ]
    assert "OF_THE_RUN" not in os.environ
    assert "different values" not in caplog.text  # they are meant to differ
    from horovod import run as local_run
    from horovod.spark import run as spark_run

    assert spark_run is run
    monkeypatch.setenv("OF_THE_RUN", "y")
    assert local_run(function, (1,), np=2, hosts="localhost:2", use_gloo=True) == [(0, 2, "y"), (1, 2, "y")]


@pytest.mark.soak  # tests/driver/test_local.py shows it by default
def test_exceptions_are_the_functions_own() -> None:
    def fails_on_rank_1() -> None:
        hvd.init()
        if hvd.rank() == 1:
            raise ZeroDivisionError("of rank 1")
        hvd.allreduce(torch.ones(1), name="forever")

    with pytest.raises(ZeroDivisionError, match="of rank 1"):
        run(fails_on_rank_1, num_proc=2)


def test_a_rank_that_waits_for_one_that_has_ended_is_told() -> None:
    def ends_on_rank_1() -> None:
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1), name="missed")

    with pytest.raises(
        hvd.HorovodInternalError, match=r"'missed' will never be done: rank 1 has ended|lost each other"
    ):
        run(ends_on_rank_1, num_proc=2)


def test_ranks_that_wait_for_each_other_are_told() -> None:
    def crosses() -> str:
        hvd.init()
        with pytest.raises(hvd.HorovodInternalError) as raised:
            hvd.allreduce(torch.ones(1), name=f"of rank {hvd.rank()}")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()  # and goes on
        return str(raised.value)

    told = run(crosses, num_proc=3)
    waits = [f"rank {rank} waits for 'of rank {rank}'" for rank in range(3)]
    assert set(told) == {f"no rank can go on: {'; '.join(waits)}. All ranks must ask for the same names"}


def test_a_rank_that_has_joined_is_told_when_the_others_wait_for_each_other() -> None:
    def crosses() -> tuple[str, int]:
        hvd.init()
        with pytest.raises(hvd.HorovodInternalError) as raised:
            hvd.join() if hvd.rank() == 0 else hvd.allreduce(torch.ones(1), name=f"of rank {hvd.rank()}")
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()  # and goes on
        if hvd.rank() == 0:  # and joins
            return str(raised.value), hvd.join()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size() - 1
        return str(raised.value), hvd.join()

    told = run(crosses, num_proc=3)
    message = (
        "no rank can go on: rank 0 has joined; rank 1 waits for 'of rank 1'; rank 2 waits for 'of rank 2'. "
        "All ranks must ask for the same names"
    )
    assert {text for text, _ in told} == {message}
    assert len({last for _, last in told} & {1, 2}) == 1 == len({last for _, last in told})


@pytest.mark.soak  # above, ranks that wait in vain are told by default
def test_a_rank_that_is_awaited_too_long_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "1.5")

    def is_late() -> str:
        import time

        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            while not (tmp_path / "told").exists():
                time.sleep(0.01)
            return ""
        try:
            hvd.allreduce(torch.ones(1), name="awaited")
        except hvd.HorovodInternalError as error:
            return str(error)
        finally:
            (tmp_path / "told").touch()
        return "it was done"

    told = run(is_late, num_proc=2)[0]
    assert "'awaited' was asked for" in told
    assert told.endswith("s ago here, and not by rank 1, which waits for nothing")


def test_the_runners_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[TorchDistributedConfig] = []

    def instead(train: Any, config: TorchDistributedConfig) -> Any:
        configs.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "lagom", instead)
    with pytest.warns(FutureWarning, match=r"HorovodRunner\(np=0\) takes all task slots of the cluster"):
        everything = HorovodRunner(np=0)
    for runner in (everything, HorovodRunner(np=4, driver_log_verbosity="all"), HorovodRunner(np=-3)):
        with pytest.raises(KeyboardInterrupt):
            runner.run(train_hvd, learning_rate=1.0)
    assert [(one.world_size, one.launcher, one.log) for one in configs] == [
        (None, "auto", "rank0"),
        (4, "auto", "all"),
        (3, "local", "rank0"),
    ]
    assert {one.name for one in configs} == {"train_hvd"}
    for wrong in ("2", 2.0, True, None):
        with pytest.raises(ValueError, match="want the number of processes"):
            HorovodRunner(np=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="want 'all' or 'log_callback_only'"):
        HorovodRunner(np=1, driver_log_verbosity="none")
    with pytest.raises(ValueError, match="want the function itself"):
        HorovodRunner(np=-1).run(3)  # type: ignore[arg-type]
    for setting in ({"use_mpi": True}, {"extra_mpi_args": "-x"}, {"stdout": sys.stdout}, {"executable": "python2"}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(setting))}=.* is not served"):
            run(train_hvd, (1.0,), **setting)
    with pytest.raises(NotImplementedError, match="elsewhere is another machine"):
        importlib.import_module("horovod").run(train_hvd, (1.0,), hosts="elsewhere:2")


def test_names_are_found_and_what_is_not_served_is_told() -> None:
    import horovod
    import horovod.torch
    import horovod.torch.elastic
    import horovod.torch.mpi_ops
    from horovod.common.exceptions import HorovodInternalError
    from horovod.torch.compression import Compression
    from horovod.torch.elastic.sampler import ElasticSampler
    from sparkdl import HorovodRunner as OfSparkdl
    from sparkdl.horovod import log_to_driver

    assert horovod.torch is hvd
    assert horovod.torch.mpi_ops.allreduce is hvd.allreduce
    assert horovod.torch.elastic.ElasticSampler is ElasticSampler
    assert (HorovodInternalError, Compression) == (hvd.HorovodInternalError, hvd.Compression)
    assert OfSparkdl is HorovodRunner
    assert callable(log_to_driver)
    assert horovod.__version__ == horovod_modules.VERSION
    for name, instead in horovod_modules.INSTEAD.items():
        with pytest.raises(ImportError, match="is not served by lagom") as raised:
            importlib.import_module(name)
        assert instead in str(raised.value)
    with pytest.raises(AttributeError, match="run_elastic is not served by lagom; a run keeps its ranks"):
        _ = importlib.import_module("horovod.spark").run_elastic
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("horovod.nothing")
    lagom.extensions.compat.horovod.remove()
    assert not {name for name in sys.modules if name.partition(".")[0] in ("horovod", "sparkdl")}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("horovod")


def test_an_installed_package_is_left_alone_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "horovod" / "torch").mkdir(parents=True)
    for package in ("horovod", "horovod/torch"):
        (tmp_path / package / "__init__.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(horovod_modules.FORCE, raising=False)
    lagom.extensions.compat.horovod.install()
    assert importlib.import_module("horovod.torch").REAL
    for name in ("horovod", "horovod.torch"):
        del sys.modules[name]
    monkeypatch.setenv(horovod_modules.FORCE, "")  # install() sets it for ranks; this puts it back
    lagom.extensions.compat.horovod.install(force=True)
    assert importlib.import_module("horovod.torch") is hvd
    assert os.environ[horovod_modules.FORCE] == "force"


def test_only_programs_that_name_it_are_taken_for_horovods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_global() -> None:
        hvd.init()

    def by_import() -> None:
        import horovod.torch as it

        it.init()

    def ordinary() -> int:
        return len(X)

    (tmp_path / "of_the_users_own.py").write_text("from horovod import torch as hvd\ndef go(): hvd.init()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def by_module() -> None:
        import of_the_users_own  # type: ignore[import-not-found]

        of_the_users_own.go()

    assert [is_distributed(one) for one in (by_global, by_import, by_module, ordinary)] == [True, True, True, False]


def test_inside_a_run_the_names_are_there_for_such_programs_and_gone_afterwards() -> None:
    lagom.extensions.compat.horovod.remove()
    for _ in range(2):
        with compatible(True):
            found = importlib.import_module("horovod.torch")
            assert found is hvd
            assert importlib.import_module("sparkdl").HorovodRunner is HorovodRunner
        assert "horovod" not in sys.modules
        assert not lagom.extensions.compat.horovod.installed()
    with compatible(False), pytest.raises(ModuleNotFoundError):
        importlib.import_module("horovod.torch")
    lagom.extensions.compat.horovod.install()
    with compatible(True):
        importlib.import_module("horovod.torch")
    assert lagom.extensions.compat.horovod.installed()  # the caller's own


def test_a_program_of_one_process_needs_no_run_and_inline_is_one() -> None:
    import horovod.torch as it

    def program() -> Any:
        it.init()
        x = it.allreduce(torch.tensor([3.0]), op=it.Sum)
        return it.rank(), it.size(), it.allgather(x).tolist(), it.join(), torch.distributed.is_initialized()

    config = TorchDistributedConfig(launcher="inline", run_dir=None)
    assert experiment.lagom(program, config).value == (0, 1, [3.0], 0, True)
    assert not it.is_initialized()
    assert not torch.distributed.is_initialized()
    try:
        assert program() == (0, 1, [3.0], 0, False)
    finally:
        it.shutdown()


def test_importing_the_package_imports_neither_torch_nor_pyspark() -> None:
    code = """
    import sys
    from lagom.extensions.compat.horovod import HorovodRunner, run
    import horovod, horovod.spark, sparkdl
    sparkdl.HorovodRunner, horovod.spark.run, horovod.run
    print(sorted({"torch", "pyspark"} & set(sys.modules)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
