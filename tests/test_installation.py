"""``pip install "lagom-spark[spark]"`` alone is enough to run on Spark."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import lagom
from tests.integration import clusters

ROOT = Path(__file__).parent.parent


def requirements(extra: str | None = None) -> list[Requirement]:
    """Return the project's requirements, with those of ``extra``, from its file."""
    tomllib: Any = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"] | {None: []}
    return [Requirement(text) for text in (*project["dependencies"], *extras[extra])]


def closure(wanted: list[Requirement]) -> set[str]:
    """Distributions of this environment that an installation of ``wanted`` brings, by their normalised names."""
    found: set[str] = set()
    waiting, seen = list(wanted), set[str]()
    while waiting:
        asked = waiting.pop()
        if str(asked) in seen:
            continue
        seen.add(str(asked))
        found.add(_normalised(asked.name))
        for text in metadata.requires(asked.name) or []:
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *asked.extras)):
                waiting.append(inner)
    return found


def _normalised(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def test_the_conda_recipe_has_the_requirements_of_the_package() -> None:
    recipe = (ROOT / "packaging" / "conda-forge" / "recipe.yaml").read_text()
    (listed,) = re.findall(r"^  run:\n((?:    - .*\n)+)", recipe, re.MULTILINE)
    found = {line.removeprefix("    - ").replace("pytorch", "torch") for line in listed.splitlines()}
    assert found == {f"{one.name} {one.specifier}" for one in requirements()} | {"python"}
    assert f'version: "{lagom.__version__}"' in recipe


def test_the_extra_for_spark_has_what_pyspark_imports() -> None:
    pytest.importorskip("pyspark")
    brought = closure(requirements("spark"))
    others = [
        module
        for module, names in metadata.packages_distributions().items()
        if brought.isdisjoint(map(_normalised, names)) and module != "lagom"
    ]
    assert "pytest" in others
    code = f"""
import sys
class Only:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {others!r}:
            raise ModuleNotFoundError("No module named " + repr(name))
sys.meta_path.insert(0, Only())
from lagom.spark.spark_master import check_packages
check_packages()
import pyspark.sql.pandas.map_ops, pyspark.sql.pandas.functions
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def fresh() -> Iterator[Path]:
    """A new virtual environment that has only pip, and this environment's torch by links; gone afterwards.

    torch is not downloaded: it may come with gigabytes of CUDA.
    """
    faulthandler.cancel_dump_traceback_later()  # which would end the tests after two minutes
    with tempfile.TemporaryDirectory(prefix="lagom-fresh-", dir="/var/tmp") as folder:
        environment, shared = Path(folder, "venv"), Path(folder, "site-packages")
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        shared.mkdir()
        packages = Path(sysconfig.get_paths()["purelib"])
        for name in closure([Requirement("torch")]):
            tops = {file.parts[0] for file in metadata.files(name) or []}
            for top in tops - {"..", "__pycache__", *os.listdir(shared)}:  # CUDA's packages share a folder
                (shared / top).symlink_to(packages / top)
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        (environment / "lib" / python / "site-packages" / "shared.pth").write_text(f"{shared}\n")
        yield environment


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pyspark", ["pyspark==4.3.0", "pyspark==3.5.9"])
def test_the_extra_alone_runs_on_spark_from_an_environment_that_is_not_activated(
    pyspark: str, fresh: Path, tmp_path: Path
) -> None:
    if not clusters.java():
        pytest.skip("no Java here")
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    env |= {"PATH": f"{Path(sys.base_prefix, 'bin')}{os.pathsep}{env['PATH']}", "SKBUILD_WHEEL_CMAKE": "false"}

    def said(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return done.stdout

    python = str(fresh / "bin" / "python")
    said(python, "-m", "pip", "install", "--quiet", f"{ROOT}[spark]", pyspark)
    program = str(shutil.copy(ROOT / "examples" / "scalar_field.py", tmp_path))
    text = said(python, program, "--epochs", "1", "--points", "500")
    plain, ranks = re.findall(r"^(?:plain PyTorch|lagom, world size 2): test loss ([\d.]+)", text, flags=re.MULTILINE)
    assert ranks == plain
    lagom = str(fresh / "bin" / "lagom")
    assert "FAIL" not in said(lagom, "doctor", "-n", "1")
    found = said(lagom, "doctor", "-n", "2", "--master", "local-cluster[2,1,1024]")  # executors of their own
    assert "2 ranks ran and came back" in found
