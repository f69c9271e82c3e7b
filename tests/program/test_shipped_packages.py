"""``lagom.program.shipped_packages``: which packages are sent, with what they require."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lagom.errors import PlanError
from lagom.plan import Package
from lagom.program import shipped_packages
from lagom.program.shipped_packages import ship_packages
from tests.installed import install


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def package(name: str) -> Package:
    return Package(name=name, distribution=name, version="1")


def test_pure_packages_travel_with_what_they_require(packages: Path, tmp_path: Path) -> None:
    install(
        packages,
        "sent-a",
        "1",
        {"sent_a/__init__.py": "from sent_b import x", "sent_a/data.txt": "text", "sent_a/__pycache__/a.pyc": ""},
        ("sent-b>=0.1; python_version >= '3'", "sent-extra; extra == 'more'", "numpy", "absent-here"),
    )
    install(packages, "sent-b", "2", {"sent_b.py": "x = 5"}, ("compiled-c",))
    install(packages, "sent-extra", "1", {"sent_extra.py": ""})
    install(packages, "compiled-c", "1", {"compiled_c/__init__.py": "", "compiled_c/_c.cpython-311-x86_64.so": ""})
    importlib.invalidate_caches()
    found = ship_packages([package("sent-a"), package("torch"), Package(name="of_nobody")])
    assert found.distributions == ("sent-a", "sent-b")
    names = zipfile.ZipFile(io.BytesIO(found.archive)).namelist()
    assert {"sent_a/__init__.py", "sent_a/data.txt", "sent_b.py", "sent_a-1.dist-info/METADATA"} <= set(names)
    assert not [name for name in names if name.endswith(".pyc") or ".." in name]
    zipfile.ZipFile(io.BytesIO(found.archive)).extractall(tmp_path / "there")
    code = "import sent_a, importlib.metadata as m; print(sent_a.x, m.version('sent-a'))"
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.append({str(tmp_path / 'there')!r}); {code}"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["5", "1"]


def test_nothing_is_sent_for_packages_that_each_executor_has() -> None:
    assert ship_packages([package("torch"), package("sympy")]).archive == b""  # torch requires sympy


def test_packages_that_are_too_large_are_refused(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(packages, "sent-large", "1", {"sent_large/__init__.py": "", "sent_large/data": "text"})
    importlib.invalidate_caches()
    monkeypatch.setattr(shipped_packages, "MOST_BYTES", 10)
    with pytest.raises(PlanError, match=r"would send more than 0 MB \(sent-large\); pack the environment once instead"):
        ship_packages([package("sent-large")])
