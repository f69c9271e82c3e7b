"""``lagom.extensions.compat.maggy``: programs written for Maggy run as they are, with no Maggy installed."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import lagom.extensions.compat.petastorm  # noqa: F401  # which writes a data set with today's pyarrow
from lagom import cli
from lagom import config as lagom_config
from lagom import experiment as lagom_experiment
from lagom.extensions.compat import maggy
from lagom.extensions.zero.deepspeed.loading import load
from tests.extensions.data.write_rows import write
from tests.imported_once import forked_server, imported_once  # noqa: F401

ROOT = Path(__file__).parents[3]
POINTS = torch.rand((90, 2), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SET = TensorDataset(POINTS, POINTS.sum(dim=1))


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    """``import maggy`` works during each test, and is undone after it."""
    maggy.install()
    assert maggy.installed()
    yield
    maggy.remove()
    assert not [name for name in sys.modules if name.partition(".")[0] == "maggy"]


class Line(torch.nn.Module):
    """Maps points of shape (B, 2) to numbers of shape (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, points: Any) -> Any:
        """Return numbers of shape (B,)."""
        return self.layer(points).squeeze(1)


def fit(module: Any, hparams: Any, train_set: Any, test_set: Any) -> Any:
    """Returns the loss as a tensor, as the article's program does."""
    import torch

    model = module(**hparams)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = torch.nn.MSELoss()
    for points, values in torch.utils.data.DataLoader(train_set, batch_size=10):
        optimizer.zero_grad()
        criterion(model(points), values).backward()
        optimizer.step()
    model.eval()
    return sum(criterion(model(x).detach(), y) * len(y) for x, y in torch.utils.data.DataLoader(test_set, 20)) / 90


def test_the_earlier_spelling_gives_what_lagoms_own_does() -> None:
    from maggy import experiment
    from maggy.experiment_config import LagomConfig, TorchDistributedConfig

    config = TorchDistributedConfig(module=Line, train_set=SET, test_set=SET, name="line", hb_interval=1)
    assert isinstance(config, LagomConfig)
    config.world_size = 3
    torch.manual_seed(0)
    found = experiment.lagom(fit, config)
    given: dict[str, Any] = {
        "module": Line,
        "train_set": SET,
        "test_set": SET,
        "batches": "per_rank",
        "launcher": "local",
    }
    torch.manual_seed(0)
    own = lagom_experiment.lagom(fit, lagom_config.TorchDistributedConfig(**given, world_size=3))
    assert isinstance(found["test result"], torch.Tensor)
    assert torch.equal(found["test result"], own["test result"])
    assert found == {"test result": found["test result"]}
    # By hand: three ranks with 10 points each take a step together, so the plain loop takes them 30 at a time.
    torch.manual_seed(0)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 90, 30):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(POINTS[start : start + 30]), SET.tensors[1][start : start + 30]).backward()
        optimizer.step()
    expected = torch.nn.functional.mse_loss(model(POINTS), SET.tensors[1])
    torch.testing.assert_close(found["test result"], expected.detach(), rtol=1e-12, atol=0)


@pytest.mark.soak
def test_the_later_spelling_does_so_too_by_position_and_with_zero() -> None:
    from maggy.config import TorchDistributedConfig
    from maggy.experiment import experiment
    from maggy.experiment.experiment import lagom

    def train(module: Any, dataset: Any, hparams: Any, reporter: Any) -> Any:
        reporter.broadcast(0.5, 1)
        reporter.broadcast(0.25, 1)
        reporter.log("shown", jupyter=True)
        return {"loss": float(fit(module, hparams, *dataset))}

    config = TorchDistributedConfig(Line, [SET, SET], {}, "torch", False, 1)
    assert (config.zero_lvl, config.batches, config.backend) == (1, "per_rank", "torch")
    config.world_size = 2
    torch.manual_seed(0)
    first = experiment.lagom(train, config)
    config.zero_lvl = 0
    torch.manual_seed(0)
    second = lagom(train_fn=train, config=config)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-12)
    assert first["test result"] == {"loss": first["loss"]}


def test_one_rank_is_a_plain_call() -> None:
    from maggy import experiment
    from maggy.experiment_config import TorchDistributedConfig

    torch.manual_seed(0)
    plain = fit(Line, {}, SET, SET)
    config = TorchDistributedConfig(Line, SET, SET, launcher="inline", run_dir=None)
    torch.manual_seed(0)
    assert torch.equal(experiment.lagom(fit, config)["test result"], plain)


def test_what_the_config_has_not_got_is_none() -> None:
    from maggy import experiment
    from maggy.config import TorchDistributedConfig

    inline: dict[str, Any] = {"launcher": "inline", "run_dir": None}

    def earlier(module: Any, hparams: Any, train_set: Any, test_set: Any) -> Any:
        return train_set, test_set, dict(hparams), module.__name__

    def later(dataset: Any) -> Any:
        return dataset

    assert experiment.lagom(earlier, TorchDistributedConfig(Line, **inline)).value == (None, None, {}, "Line")
    assert experiment.lagom(later, TorchDistributedConfig(Line, **inline)).value is None
    assert experiment.lagom(later, TorchDistributedConfig(Line, ["a"], **inline)).value == ["a"]
    assert experiment.lagom(later, TorchDistributedConfig(Line, ["a", "b", "c"], **inline)).value == ["a", "b", "c"]
    assert experiment.lagom(later, TorchDistributedConfig(Line, train_set="a", test_set="b", **inline)).value == [
        "a",
        "b",
    ]


def test_without_a_config_the_function_runs_once() -> None:
    from maggy import experiment

    assert experiment.lagom(lambda: 5).per_rank == (5,)


@pytest.fixture(scope="module")
def _deepspeed_loaded() -> None:
    """Once, and not in every rank."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setitem(sys.modules, "mlflow", None)  # DeepSpeed does without it, and its import is slow
        load("cpu")


@pytest.mark.soak
@pytest.mark.usefixtures("_deepspeed_loaded")
def test_deepspeed_programs_run_on_cpu_too() -> None:
    from maggy import experiment
    from maggy.experiment_config import TorchDistributedConfig

    images = torch.rand((24, 1, 6, 6), generator=torch.Generator().manual_seed(2))

    def module() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))

    def train(module: Any, hparams: Any, train_set: Any, test_set: Any) -> Any:
        from maggy.core.patching import MaggyDataLoader

        model = module(**hparams)
        criterion = torch.nn.CrossEntropyLoss()
        losses = []
        for _ in range(8):
            for pixels, labels in MaggyDataLoader(train_set, batch_size=4):
                loss = criterion(model(pixels.half()), labels.half().long())
                model.backward(loss)
                torch.cuda.max_memory_allocated(0)
                model.step()
            losses.append(float(loss.detach()))
        return losses[-1] / losses[0]

    wanted = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }
    sets = {"train_set": TensorDataset(images, (images.mean(dim=(1, 2, 3)) > 0.5).long())}
    config = TorchDistributedConfig(module=module, **sets, backend="deepspeed", deepspeed_config=wanted)
    assert config.zero_lvl == 2
    config.world_size = 2
    with forked_server():
        assert experiment.lagom(train, config)["test result"] < 0.8
    assert wanted["optimizer"] == {"type": "Adam", "params": {"lr": 0.01}}


def test_a_data_set_of_petastorms_is_read_once_over_all_ranks(tmp_path: Path) -> None:
    from maggy import experiment
    from maggy.experiment_config import TorchDistributedConfig

    def train(module: Any, hparams: Any, train_set: str, test_set: Any) -> Any:
        from maggy.core.patching import MaggyPetastormDataLoader

        from lagom import rank

        def halved(row: Any) -> Any:
            return {"image": row["image"] / 2, "id": row["id"]}

        model = torch.nn.LazyLinear(1)
        seen = []
        for batch in MaggyPetastormDataLoader(train_set, batch_size=2, transform_spec=halved):
            model(batch["image"].flatten(1).float()).sum().backward()
            seen += batch["id"].tolist()
        return rank(), seen

    config = TorchDistributedConfig(module=None, train_set=write(tmp_path / "table", [[3, 4], [5]]).as_uri())
    config.world_size = 2
    ranks = experiment.lagom(train, config).per_rank
    assert [rank for rank, _ in ranks] == [0, 1]
    assert all(seen for _, seen in ranks)
    assert sorted(ranks[0][1] + ranks[1][1]) == list(range(12))


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        ("maggy.config", "TfDistributedConfig", "tf.distribute"),
    ],
)
def test_what_is_not_served_says_so(module: str, name: str, instead: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    with pytest.raises(NotImplementedError, match=f"{name} is not served by lagom.*{instead}"):
        kind(num_trials=4)


def test_what_the_command_line_says_holds_where_the_config_does_not() -> None:
    from maggy import experiment
    from maggy.config import TorchDistributedConfig

    asked = lagom_config.TorchDistributedConfig(world_size=3, zero_lvl=1, batches="whole", seed=5, name="program.py")
    with lagom_experiment.command_line_config(asked, {"batches"}):  # which is asked for, though it is the default
        assert lagom_experiment.command_line_fields() == {"world_size": 3, "zero_lvl": 1, "batches": "whole", "seed": 5}
        found = TorchDistributedConfig(Line, ["a"], zero_lvl=2).with_defaults(lagom_experiment.command_line_fields())
        assert (found.world_size, found.zero_lvl, found.batches, found.sets) == (3, 2, "whole", ["a"])
        assert experiment.lagom(lambda dataset: dataset, found).per_rank == (["a"],) * 3
    assert lagom_experiment.command_line_fields() == {}


def test_modules_that_are_not_served_say_so() -> None:
    for name, instead in (
        ("maggy.callbacks", "reporter.broadcast"),
        ("maggy.optimizer.asha", "Optuna"),
        ("maggy.ablation.ablator", "one component at a time"),
    ):
        with pytest.raises(ImportError, match=instead):
            importlib.import_module(name)
    with pytest.raises(NotImplementedError, match="zero_lvl"):
        from maggy.core.patching import MaggyZeroAdam  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from maggy.core.patching import nothing  # noqa: F401


def test_a_field_that_is_set_later_is_checked() -> None:
    from maggy.config import TorchDistributedConfig

    config = TorchDistributedConfig(Line)
    with pytest.raises(ValueError, match="zero_lvl is 7"):
        config.zero_lvl = 7
    assert config.zero_lvl == 0
    with pytest.raises(AttributeError, match="no field 'zero_level'"):
        config.zero_level = 1
    with pytest.raises(TypeError, match="'hparams' twice"):
        TorchDistributedConfig(Line, None, None, {}, hparams={})
    with pytest.warns(UserWarning, match="deepspeed_config is not used"):
        assert TorchDistributedConfig(Line, deepspeed_config={}).ds_config is None


def test_a_function_of_lagoms_finds_it_and_leaves_nothing_behind() -> None:
    maggy.remove()

    def train() -> Any:
        import maggy.core.patching

        return maggy.core.patching.MaggyDataLoader.__name__

    given: dict[str, Any] = {"run_dir": None}
    for _ in range(2):
        config = lagom_config.TorchDistributedConfig(launcher="inline", **given)
        assert lagom_experiment.lagom(train, config).value == "MaggyDataLoader"
        assert not maggy.installed()
        assert "maggy" not in sys.modules
    config = lagom_config.TorchDistributedConfig(launcher="local", world_size=2, **given)
    assert lagom_experiment.lagom(train, config).per_rank == ("MaggyDataLoader",) * 2


def test_the_real_one_is_left_alone_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maggy.remove()
    (tmp_path / "maggy").mkdir()
    (tmp_path / "maggy" / "__init__.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    maggy.install()
    assert importlib.import_module("maggy").REAL
    assert not maggy.installed()
    maggy.install(force=True)
    assert not hasattr(importlib.import_module("maggy"), "REAL")

    def train() -> bool:
        import maggy

        return hasattr(maggy, "REAL")

    config = lagom_config.TorchDistributedConfig(launcher="local", world_size=2, run_dir=None)
    assert lagom_experiment.lagom(train, config).per_rank == (False, False)
    maggy.remove()
    assert importlib.import_module("maggy").REAL
    assert lagom_experiment.lagom(train, config).per_rank == (True, True)
    del sys.modules["maggy"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lagom.cli", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_example_runs_unchanged_under_lagom_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    maggy.remove()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the script, until the test ends
    line = ["run", "-n", "2", "--seed", "1", "examples/maggy/scalar_field.py", "--epochs", "1", "--points", "500"]
    status = cli.main(line)
    out, err = capfd.readouterr()
    assert status == 0, err
    first, second = out.splitlines()
    assert first.removeprefix("zero_lvl=0") == second.removeprefix("zero_lvl=2")
    assert err.count("2 ranks on this machine") == 2


@pytest.mark.integration
@pytest.mark.soak
def test_the_example_runs_on_spark() -> None:
    where = ("-n", "2", "--seed", "1", "--master", "spark")
    done = run(*where, "examples/maggy/scalar_field.py", "--epochs", "1", "--points", "500")
    assert done.returncode == 0, done.stderr
    assert "2 ranks on Spark local[2]" in done.stderr
    first, second = done.stdout.splitlines()
    assert first.removeprefix("zero_lvl=0") == second.removeprefix("zero_lvl=2")


@pytest.mark.soak  # tests/test_cli.py shows it by default
def test_its_error_is_pythons(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("from maggy import experiment\nimport sys\nif sys.argv[1] == 'a':\n    sys.exit(7)\n1 / 0\n")
    assert run(str(script), "a").returncode == 7
    done = run(str(script), "b")
    assert done.returncode == 1
    assert "line 5, in <module>\n    1 / 0\n" in done.stderr


@pytest.mark.soak
def test_the_example_with_images_learns(capsys: pytest.CaptureFixture[str]) -> None:
    main: Callable[[list[str]], None] = importlib.import_module("examples.maggy.images").main
    main(["--images", "400", "--epochs", "6"])
    *_, last = capsys.readouterr().out.splitlines()
    assert float(last.removeprefix("accuracy ")) > 0.9
