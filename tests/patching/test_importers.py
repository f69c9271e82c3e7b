"""``Importers``: where a library's functions are found, also once they have been searched for and remembered."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from lagom.patching import importers
from lagom.patching.importers import Importers, remember_importers


def serve() -> None:
    """Stand for a function of a library."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Importers:
    """A library that has ``serve``, and a module that has imported it by its name."""
    monkeypatch.setattr(importers, "all_importers", [])
    return Importers(imported(monkeypatch, "library", serve=serve), "serve")


def imported(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> ModuleType:
    module = ModuleType(f"lagom_test_{name}")
    vars(module).update(contents)
    monkeypatch.delitem(sys.modules, module.__name__, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def names(found: list[tuple[ModuleType, str]]) -> list[str]:
    return sorted(f"{module.__name__}.{name}".removeprefix("lagom_test_") for module, name in found)


@pytest.mark.parametrize("is_remembered", [False, True])
def test_modules_with_the_function_are_found(
    library: Importers, is_remembered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported(monkeypatch, "before", serve=serve)
    imported(monkeypatch, "other", serve=len)
    if is_remembered:
        remember_importers()
    imported(monkeypatch, "after", serve=serve)
    imported(monkeypatch, "again", serve=len)
    assert {"library.serve", "before.serve", "after.serve"} == {*names(library.find())} - {f"{__name__}.serve"}


def test_a_module_that_is_imported_again_is_found(library: Importers, monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch, "program", serve=len)
    remember_importers()
    again = imported(monkeypatch, "program", serve=serve)
    assert (again, "serve") in library.find()


def test_all_modules_are_searched_where_the_last_one_has_been_removed(
    library: Importers, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = imported(monkeypatch, "last")
    remember_importers()
    del sys.modules[last.__name__]
    after = imported(monkeypatch, "after", serve=serve)
    assert (after, "serve") in library.find()
    monkeypatch.setitem(sys.modules, last.__name__, last)


def test_a_function_that_was_replaced_is_searched_for_anew(library: Importers, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_importers()
    program = imported(monkeypatch, "program", serve=len)
    monkeypatch.setattr(sys.modules["lagom_test_library"], "serve", len)
    assert (program, "serve") in library.find()


def test_a_module_that_has_a_function_of_its_own_since_keeps_it(
    library: Importers, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = imported(monkeypatch, "program", serve=serve)
    remember_importers()
    monkeypatch.setattr(program, "serve", len)
    assert (program, "serve") not in library.find()
