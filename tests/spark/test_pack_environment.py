"""``lagom pack``: the archive of an environment, the settings that it prints, and its errors."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from lagom import cli
from tests.installed import install


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small virtual environment with one package; the process that packs it finds lagom by PYTHONPATH."""
    folder = tmp_path_factory.mktemp("pack") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    install(packages, "small", "1.0", {"small.py": "x = 1"})
    return folder


@pytest.fixture
def here(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if this process were of that environment, in an empty working directory."""
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr(sys, "path", list(sys.path))  # venv-pack imports setuptools, which adds a folder
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = cli.main(["pack", *words])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def test_an_archive_has_the_environment_and_the_settings_name_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = said(capsys)
    assert status == 0
    archive = here / "environment.tar.gz"
    with tarfile.open(archive) as tar:
        assert any(name.endswith("site-packages/small.py") for name in tar.getnames())
    assert f"spark.archives  {archive}#environment\n" in text
    assert "PYSPARK_PYTHON  ./environment/bin/python\n" in text
    assert f"Executors must have Python {sys.version_info[0]}.{sys.version_info[1]}" in text
    status, text = said(capsys)
    assert (status, text) == (
        2,
        "lagom: 'environment.tar.gz' exists already; choose another name with -o, or give --force\n",
    )
    assert said(capsys, "--force", "--python-prefix", "/usr")[0] == 0
    with tarfile.open(archive) as tar:
        links = [one.linkname for one in tar if one.issym() and one.name.endswith("/python3")]
    assert not [link for link in links if sys.base_prefix in link]


def test_what_cannot_be_packed_is_said(
    here: Path, environment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(capsys, "-o", "env.rar")[1].endswith("want a name that ends with .tar.gz or .tgz or .zip\n")
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "editable.pth").write_text("/elsewhere\n")
    status, text = said(capsys)
    (packages / "editable.pth").unlink()
    assert status == 2
    assert "Editable packages found: - /elsewhere. Install them without -e" in text
    monkeypatch.setitem(sys.modules, "venv_pack", None)
    assert said(capsys)[1].endswith("and is not installed; remedy: pip install venv-pack2\n")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert "is no environment of its own, so there is nothing to pack; make one" in said(capsys)[1]
    assert not list(here.iterdir())


def test_an_environment_of_conda_is_packed_by_conda_pack(
    here: Path, environment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (environment / "conda-meta").mkdir()
    monkeypatch.setitem(sys.modules, "conda_pack", None)
    status, text = said(capsys)
    (environment / "conda-meta").rmdir()
    assert status == 2
    assert text == (
        f"lagom: conda-pack packs a conda environment such as {environment}, and is not installed; remedy: pip install "
        "conda-pack\n"
    )
