"""``lagom.program.imported_packages``: which packages a program must have, and which it may import."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lagom.plan import Package
from lagom.program.imported_packages import imported_packages
from lagom.program.script import Script
from tests.installed import install

NAMES = ("surely", "perhaps", "deeply")


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's on ``sys.path``, and installed packages: "surely", "perhaps", "deeply" and a namespace."""
    before = set(sys.modules)
    packages = tmp_path / "lib" / "site-packages"
    for name in NAMES:
        install(packages, f"{name}-dist", "1.2", {f"{name}/__init__.py": "class Thing: pass\ndef call(): pass\n"})
    install(packages, "shared-one", "3", {"shared/one/__init__.py": ""})
    install(packages, "shared-two", "4", {"shared/two.py": ""})
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(sys, "path", [str(own), str(packages), *sys.path])
    importlib.invalidate_caches()
    yield own
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")) or name.startswith("shared"):
            del sys.modules[name]


def of_cell(source: str, name: str = "train") -> Any:
    """A function as a notebook has it: its globals are those of ``__main__``."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<a cell>", "exec"), scope)
    return scope[name]


def of_file(own: Path, source: str, name: str = "train", module: str = "lagom_of_user") -> Any:
    """A function of the user's own module."""
    (own / f"{module}.py").write_text(source)
    importlib.invalidate_caches()
    return getattr(importlib.import_module(module), name)


def kinds(*values: Any) -> dict[str, bool]:
    """Return for each of ``NAMES`` that is found whether it is needed."""
    return {one.name: one.is_needed for one in imported_packages(*values, for_executors=True) if one.name in NAMES}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import surely\ndef train(): return surely.call()", {"surely": True}),
        ("from surely import call\ndef train(): return call()", {"surely": True}),
        ("from surely import Thing\nclass Own(Thing): pass\ndef train(): return Own()", {"surely": True}),
        ("import surely\ndef other(): return surely\ndef train(): return other()", {"surely": True}),
        ("import surely\ndef train(): return 1", {}),
        ("import surely\ndef train(): return lambda: surely.call()", {"surely": True}),
        ("def other():\n    import perhaps\ndef train(): return other()", {"perhaps": False}),
        ("def train():\n    try:\n        import perhaps\n    except ImportError:\n        pass", {"perhaps": False}),
        (
            "def make():\n    import surely\n    def train(): return surely\n    return train\ntrain = make()",
            {"surely": True},
        ),
    ],
)
def test_a_notebooks_function_needs_what_is_pickled_with_it(beside: Path, source: str, wanted: dict[str, bool]) -> None:
    assert kinds(of_cell(source)) == wanted


def test_an_attribute_of_the_name_of_a_global_is_no_package(beside: Path) -> None:
    train = of_cell("import perhaps\nclass A: perhaps = 1\ndef train(): return A().perhaps")
    assert not kinds(train).get("perhaps")


MODULE = """
import surely
try:
    import perhaps
except ImportError:
    perhaps = None
def train():
    return 1
"""


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (MODULE, {"surely": True, "perhaps": False}),
        ("from lagom_other import x\ndef train(): pass", {"deeply": True}),
        ("def train():\n    import surely\n    import lagom_other", {"surely": True, "deeply": True}),
        ("def train(x=0):\n    if x:\n        return\n    import perhaps", {"perhaps": False}),
        ("def train():\n    def inner():\n        return 1\n    import surely", {"surely": True}),
        ("def train():\n    '''Text.'''\n    from surely import call", {"surely": True}),
        ("import functools\ndef f(x): import surely\ntrain = functools.partial(f, 1)", {"surely": False}),
        ("if 0:\n    import perhaps\ndef train(): pass", {"perhaps": False}),
    ],
)
def test_a_function_of_a_module_needs_what_the_module_imports(
    beside: Path, source: str, wanted: dict[str, bool]
) -> None:
    (beside / "lagom_other.py").write_text("import deeply\nx = 1\n")
    assert kinds(of_file(beside, source)) == wanted


def test_arguments_count_too(beside: Path) -> None:
    thing = importlib.import_module("surely").Thing
    assert kinds(of_cell("def train(): pass"), thing) == {"surely": True}
    assert kinds(of_cell("def train(): pass"), thing()) == {"surely": True}
    assert kinds(of_cell("def train(): pass"), functools.partial(thing)) == {"surely": True}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("import surely", {"surely": True}),
        ("def main():\n    import perhaps\nif __name__ == '__main__':\n    import surely\n    main()",
         {"surely": True, "perhaps": False}),
        ("import lagom_other\nif input():\n    raise SystemExit\nimport perhaps", {"deeply": True, "perhaps": False}),
    ],
)  # fmt: skip
def test_a_script_needs_what_it_imports_first(beside: Path, source: str, wanted: dict[str, bool]) -> None:
    (beside / "lagom_other.py").write_text("import deeply\nx = 1\n")
    (beside / "script.py").write_text(source)
    assert kinds(Script.read(beside / "script.py", [])) == wanted


def test_versions_are_those_of_the_distributions(beside: Path) -> None:
    train = of_cell("def train():\n    import shared.one, shared.two, surely")
    assert [str(one) for one in imported_packages(train, for_executors=True)] == [
        "shared-one 3 (shared.one)",
        "shared-two 4 (shared.two)",
        "surely-dist 1.2 (surely)",
    ]
    assert [str(one) for one in imported_packages(train)] == ["shared.one", "shared.two", "surely"]
    assert str(Package(name="scikit_learn", distribution="scikit-learn", version="1")) == "scikit-learn 1"


def test_what_lagom_serves_and_what_a_program_makes_is_not_needed(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "made", types.ModuleType("made"))
    train: Callable[..., Any] = of_cell("import made, surely\ndef train(): return made, surely")
    assert {one.name: one.is_needed for one in imported_packages(train, served=["surely"], for_executors=True)} == {
        "made": False
    }
