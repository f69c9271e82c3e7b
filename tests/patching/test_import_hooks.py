"""``on_import``: a change is made once to each module, whoever finds the module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lagom.patching.importers import on_import

NAME = "lagom_test_imported"


class EditableFinder:
    """Finds one module outside of ``sys.path``, as setuptools' finders of editable installs do."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.file) if name == NAME else None


class AskingFinder:
    """Asks all finders for each module, as the finders of wrapt do."""

    is_asking = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != NAME or self.is_asking:
            return None
        self.is_asking = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.is_asking = False


@pytest.fixture
def editable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    file = tmp_path / "source.py"
    file.write_text("changes = []\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder(file)])
    yield
    sys.modules.pop(NAME, None)


def add(what: str) -> Any:
    def change(module: ModuleType) -> None:
        module.changes.append(what)

    return change


def test_a_module_of_another_finder_is_changed_each_time_it_runs(editable: None) -> None:
    with on_import({NAME: add("first")}):
        assert importlib.util.find_spec(NAME) is not None
        module = importlib.import_module(NAME)
        assert module.changes == ["first"]
        assert importlib.reload(module).changes == ["first"]
    assert importlib.reload(module).changes == []


def test_a_module_that_several_contexts_name_gets_all_changes(editable: None) -> None:
    with on_import({NAME: add("outer")}), on_import({NAME: add("inner")}):
        module = importlib.import_module(NAME)
        assert sorted(module.changes) == ["inner", "outer"]
        with on_import({NAME: add("late")}):
            assert sorted(module.changes) == ["inner", "late", "outer"]


def test_a_change_is_made_once_where_another_finder_asks_all(editable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [AskingFinder(), *sys.meta_path])
    with on_import({NAME: add("first")}):
        assert importlib.import_module(NAME).changes == ["first"]
