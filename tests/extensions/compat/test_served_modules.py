"""``ServedModules``: what hides served modules, and what does not. Horovod's and Maggy's are the judges."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lagom.extensions.compat import horovod, maggy


@pytest.fixture(autouse=True)
def served() -> Iterator[None]:
    """Serve both packages during the test only."""
    yield
    horovod.remove()
    maggy.remove()


def test_a_script_or_a_folder_of_the_name_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod.py").write_text("raise AssertionError('a script of the user')\n")
    (tmp_path / "maggy").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    horovod.install()
    maggy.install()
    assert importlib.import_module("horovod.torch") is importlib.import_module("lagom.extensions.compat.horovod.torch")
    assert importlib.import_module("maggy").Searchspace


def test_one_package_may_be_installed_and_the_other_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sparkdl").mkdir()
    (tmp_path / "sparkdl" / "__init__.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    horovod.install()
    assert importlib.import_module("sparkdl").REAL
    assert importlib.import_module("horovod.spark").run is horovod.run
    horovod.remove()
    assert "horovod.spark" not in sys.modules
    assert sys.modules.pop("sparkdl").REAL  # it is none of lagom's


def test_a_module_that_is_not_served_says_what_to_use() -> None:
    horovod.install()
    maggy.install()
    with pytest.raises(ImportError, match=r"horovod\.tensorflow is not served by lagom; .*tf\.distribute"):
        importlib.import_module("horovod.tensorflow")
    with pytest.raises(ImportError, match=r"maggy\.pruner is not served by lagom; pass optimizer="):
        importlib.import_module("maggy.pruner")
