"""``make dist``: an sdist, wheels with the compiled part and one without, each installed where there is no compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_installation import ROOT, fresh

__all__ = ["fresh"]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
COMPILED = "lagom_spark-*-manylinux*.whl"
PURE = "lagom_spark-*-py3-none-any.whl"
SDIST = "lagom_spark-*.tar.gz"


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that ``make dist`` has just filled, or else one that is filled now."""
    if found := os.environ.get("LAGOM_DIST"):
        yield ROOT / found
        return
    folder = tmp_path_factory.mktemp("dist")
    environment = os.environ | {"OUT": str(folder), "PYTHONS": sys.executable}
    done = subprocess.run([ROOT / ".ci" / "dist"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    yield folder


def test_wheels_hold_lagom_and_nothing_else(dist: Path) -> None:
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "lagom").rglob("*.py")} | {"lagom/py.typed"}
    wheels = sorted(dist.glob("*.whl"))
    assert len(wheels) == len(list(dist.glob(COMPILED))) + 1 >= 2
    for wheel in wheels:
        listed = zipfile.ZipFile(wheel).namelist()
        names = {name for name in listed if ".dist-info/" not in name and not name.endswith("/")}
        extensions = {name for name in names if re.fullmatch(r"lagom/_native\.cpython-\d+-[\w-]+\.so", name)}
        assert names - extensions == sources, wheel.name
        assert len(extensions) == wheel.match(COMPILED), wheel.name


def test_the_sdist_holds_what_a_build_needs_and_no_tests(dist: Path) -> None:
    (path,) = dist.glob(SDIST)
    with tarfile.open(path) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert tops == {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "csrc", "lagom", "pyproject.toml"}


def test_the_compiled_wheels_are_for_systems_with_glibc_2_28(dist: Path) -> None:
    for wheel in dist.glob(COMPILED):
        least = min(int(minor) for minor in re.findall(r"manylinux_2_(\d+)", wheel.name))
        assert least <= 28, wheel.name


def programs() -> tuple[str, str]:
    """Return the script of docs/index.md and what it prints first."""
    text = (ROOT / "docs" / "index.md").read_text()
    script = re.search(r"```python\n# train\.py\n(.*?)```", text, re.DOTALL)
    printed = re.search(r"^(loss [\d.]+)$", text, re.MULTILINE)
    assert script is not None
    assert printed is not None
    return script[1], printed[1]


@pytest.mark.parametrize(("pattern", "compiled"), [(COMPILED, True), (PURE, False), (SDIST, False)])
def test_an_installation_without_a_compiler_runs_the_program_of_the_start_page(
    pattern: str, compiled: bool, dist: Path, fresh: Path, tmp_path: Path
) -> None:
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-"
    path = next(path for path in sorted(dist.glob(pattern)) if pattern != COMPILED or tag in path.name)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "env", "uname", "git"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CC", "CXX")}
    environment["PATH"] = f"{fresh / 'bin'}{os.pathsep}{tools}"

    def said(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return done.stdout

    said(fresh / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-cache-dir", path)
    script, printed = programs()
    (tmp_path / "train.py").write_text(script)
    assert said("python", "train.py").splitlines()[0] == printed
    assert said("lagom", "run", "-n", "2", "train.py").splitlines()[0] == printed
    lines = said("lagom", "doctor", "-n", "2").splitlines()
    assert not [line for line in lines if line.startswith("FAIL")]
    (about,) = (line for line in lines if "compiled part" in line and not line.lstrip().startswith("->"))
    assert about.startswith("pass" if compiled else "WARN"), about


def test_the_compiled_part_loads_in_each_other_python(dist: Path, tmp_path: Path) -> None:
    """These Pythons have no torch, which the compiled part does not need; the columns of ``make matrix`` have it."""
    here = pytest.importorskip("lagom._native")
    for wheel in dist.glob(COMPILED):
        tag = re.search(r"-cp3(\d+)-", wheel.name)
        assert tag is not None
        python = shutil.which(f"python3.{tag[1]}")
        if python is None or sys.version_info[1] == int(tag[1]):
            continue
        if subprocess.run([python, "-V"], capture_output=True).returncode:
            continue  # pyenv's name for a version that is not chosen
        environment = tmp_path / tag[1]
        subprocess.run([python, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
        code = "import lagom._native as n; print(n.VERSION, n.has(0, 0))"
        command: list[str | Path] = [environment / "bin" / "python", "-c", code]
        # Not in the project's folder, in which Python would find lagom as it is there.
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout == f"{here.VERSION} True\n"
