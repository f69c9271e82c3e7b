"""Executors whose Python lacks packages: named before ranks start, sent with the run, or packed."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lagom import experiment
from lagom.config import HyperparameterOptConfig, Searchspace, TorchDistributedConfig
from lagom.errors import LagomError
from tests.installed import install
from tests.integration import clusters, programs

SPARKS = pytest.mark.parametrize("spark", ["local[2]", "standalone"], indirect=True, scope="session")
LACKED = "lacking-a 1.5 and lacking_b 2.0"


@pytest.fixture(scope="module")
def bare() -> Iterator[Path]:
    """One for all tests, whose runs share its fork server."""
    with clusters.bare_python() as python:
        yield python


@pytest.fixture
def lacking(spark: Any, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Executors run a Python without three packages that the driver has, "lacking_c" with a compiled part."""
    folder = tmp_path / "site-packages"
    install(folder, "lacking-a", "1.5", {"lacking_a/__init__.py": "from lacking_helper import x"}, ("lacking-helper",))
    install(folder, "lacking-helper", "3.0", {"lacking_helper.py": "x = 7"})
    install(folder, "lacking_b", "2.0", {"lacking_b/__init__.py": "", "lacking_b/part.py": "y = 8"})
    install(folder, "lacking_c", "1.0", {"lacking_c/__init__.py": "", "lacking_c/_c.so": ""})
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(bare))
    return bare


def message(python: Path, lacked: str) -> str:
    return f"{platform.node()} lacks {lacked} in its Python, {python}, and the driver has "


@SPARKS
def test_all_packages_that_executors_lack_are_named_before_ranks_start(
    spark: Any, lacking: Path, tmp_path: Path
) -> None:
    started = tmp_path / "started"

    def train(path: str) -> None:
        os.system(f"touch {path}")  # by another program, on the real disk
        import lacking_a  # type: ignore[import-not-found]  # noqa: F401
        import lacking_b.part  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(LagomError) as caught:
        programs.run(train, 2, hparams={"path": str(started)})
    assert str(caught.value) == (
        f"{message(lacking, LACKED)}them: install them there; or send the driver's environment ('lagom pack' makes the "
        "archive and prints Spark's settings); or, for packages without compiled parts, set packages='ship'"
    )
    assert not started.exists()


@pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
def test_a_package_that_may_not_be_imported_ends_no_run(spark: Any, lacking: Path) -> None:
    def train(wanted: bool) -> str:
        try:
            import lacking_a

            return str(lacking_a.x)
        except ImportError:
            pass
        if wanted:
            import lacking_b

            return str(lacking_b)
        return "without"

    assert programs.run(train, 2, hparams={"wanted": False}).per_rank == ("without", "without")
    with pytest.raises(ModuleNotFoundError, match="No module named 'lacking_b'") as caught:
        programs.run(train, 2, hparams={"wanted": True})
    if sys.version_info >= (3, 11):
        assert message(lacking, LACKED) in caught.value.__notes__[-1]


@SPARKS
def test_packages_without_compiled_parts_are_sent(spark: Any, lacking: Path) -> None:
    def train() -> tuple[int, int, str, str]:
        import importlib.metadata

        import lacking_a
        import lacking_b.part

        return lacking_a.x, lacking_b.part.y, importlib.metadata.version("lacking-a"), sys.prefix

    wanted = (7, 8, "1.5", str(lacking.parents[1]))
    assert programs.run(train, 2, packages="ship").per_rank == (wanted, wanted)


@pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
def test_a_package_with_compiled_parts_is_named_where_others_are_sent(spark: Any, lacking: Path) -> None:
    def train() -> None:
        import lacking_a  # noqa: F401
        import lacking_c  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(LagomError) as caught:
        programs.run(train, 2, packages="ship")
    assert message(lacking, "lacking_c 1.0") in str(caught.value)
    assert str(caught.value).endswith("packages='ship' cannot send it: it has compiled parts")


@pytest.mark.soak  # tests/spark/test_pack_environment.py has the archive by default
@pytest.mark.parametrize("spark", ["packed"], indirect=True, scope="session")
def test_executors_run_the_environment_that_the_driver_has_packed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site-packages", "packed", "1.0", {"packed.py": "x = 11"})
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    importlib.invalidate_caches()

    def train() -> tuple[int, str]:
        import packed  # type: ignore[import-not-found]

        return packed.x, packed.__file__

    for x, path in programs.run(train, 2).per_rank:
        assert x == 11
        assert "/environment/lib/python" in path


@pytest.mark.needs("search")
@pytest.mark.parametrize("spark", ["local[2]"], indirect=True, scope="session")
def test_a_search_names_them_too_and_sends_them(spark: Any, lacking: Path) -> None:
    def train(x: float) -> float:
        import lacking_a

        return x * float(lacking_a.x)

    def config(**more: Any) -> HyperparameterOptConfig:
        space = Searchspace(x=("DOUBLE", [0.0, 1.0]))
        return HyperparameterOptConfig(
            searchspace=space, num_trials=2, direction="max", optimization_key="loss", launcher="spark", **more
        )

    with pytest.raises(LagomError) as caught:
        experiment.lagom(train, config())
    assert str(caught.value).startswith(message(lacking, "lacking-a 1.5"))
    assert len(experiment.lagom(train, config(packages="ship")).trials) == 2


def test_processes_of_this_machine_have_what_the_driver_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site-packages", "lacking-a", "1.5", {"lacking_a/__init__.py": "x = 3"})
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    importlib.invalidate_caches()

    def train() -> int:
        import lacking_a

        return int(lacking_a.x)

    for packages in ("installed", "ship"):
        config = TorchDistributedConfig(launcher="local", world_size=2, run_dir=None, packages=packages)
        assert experiment.lagom(train, config).per_rank == (3, 3)
