"""``lagom.program.sources``: the user's own modules travel, what is installed does not."""

from __future__ import annotations

import functools
import importlib
import io
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lagom.program.sources import is_installed, lagom_zip, modules_zip, source_files


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's on ``sys.path``; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def names(function: Callable[..., Any]) -> set[str]:
    data = modules_zip(function)
    return set(zipfile.ZipFile(io.BytesIO(data)).namelist()) if data else set()


def function_of(source: str, name: str = "train") -> Callable[..., Any]:
    """A function as a notebook has it: its globals are those of ``__main__``."""
    scope: dict[str, Any] = {"__name__": "__main__", "functools": functools}
    # Not "<string>": Python 3.13 takes this name for the program after ``python -c``, which xdist's processes have.
    exec(compile(source, "<a cell>", "exec"), scope)
    return scope[name]  # type: ignore[no-any-return]


def test_a_module_that_is_loaded_travels(beside: Path) -> None:
    (beside / "lagom_loaded.py").write_text("x = 1\n")
    importlib.import_module("lagom_loaded")
    assert "lagom_loaded.py" in names(lambda: None)


HELPER = "def helper():\n    import lagom_inside\n"
METHOD = "class Net:\n    def forward(self):\n        import lagom_inside\n"
CLOSURE = """
def make():
    def inner():
        import lagom_inside
    def outer():
        return inner()
    return outer
train = make()
"""
CALLABLES = """
class Trainer:
    def fit(self):
        import lagom_inside
    def __call__(self):
        self.fit()
partial = functools.partial(Trainer.fit, None)
method = Trainer().fit
called = Trainer()
"""


@pytest.mark.parametrize(
    ("source", "name"),
    [
        # The tests below import so.
        pytest.param("def train():\n    import lagom_inside", "train", marks=pytest.mark.soak),
        pytest.param("def train():\n    from lagom_inside import x", "train", marks=pytest.mark.soak),
        pytest.param(HELPER + "def train():\n    return helper()", "train", marks=pytest.mark.soak),
        (HELPER + "def train():\n    return (lambda: helper())()", "train"),
        (METHOD + "def train():\n    return Net()", "train"),
        (CLOSURE, "train"),
        (CALLABLES, "partial"),
        pytest.param(CALLABLES, "method", marks=pytest.mark.soak),
        (CALLABLES, "called"),
    ],
)
def test_a_module_that_is_only_imported_inside_travels(beside: Path, source: str, name: str) -> None:
    (beside / "lagom_inside.py").write_text("x = 1\n")
    assert "lagom_inside.py" in names(function_of(source, name))
    assert "lagom_inside" not in sys.modules


def test_what_a_module_of_ones_own_imports_travels_too(beside: Path) -> None:
    (beside / "lagom_first.py").write_text("def f():\n    import lagom_second.part\n")
    (beside / "lagom_second").mkdir()
    (beside / "lagom_second" / "__init__.py").write_text("")
    (beside / "lagom_second" / "part.py").write_text("import json, torch\n")
    found = names(function_of("def train():\n    import lagom_first"))
    assert {"lagom_first.py", "lagom_second/__init__.py", "lagom_second/part.py"} <= found
    assert not any(name.startswith(("torch", "json")) for name in found)


def test_two_modules_that_import_each_other_are_found_once(beside: Path) -> None:
    (beside / "lagom_a.py").write_text("import lagom_b\n")
    (beside / "lagom_b.py").write_text("import lagom_a\n")
    assert {"lagom_a.py", "lagom_b.py"} <= names(function_of("def train():\n    import lagom_a"))


def test_a_package_travels_whole_with_its_data_but_not_with_its_caches(beside: Path) -> None:
    package = beside / "lagom_package"
    (package / "deep" / "__pycache__").mkdir(parents=True)
    (package / ".git").mkdir()
    for name in ("__init__.py", "deep/__init__.py", "deep/words.txt", "deep/__pycache__/x.pyc", ".git/config"):
        (package / name).write_text("")
    (package / "weights.bin").write_bytes(bytes(2 << 20))
    found = {name for name in names(function_of("def train():\n    import lagom_package.deep")) if "lagom_" in name}
    assert found == {
        "lagom_package/__init__.py",
        "lagom_package/deep/__init__.py",
        "lagom_package/deep/words.txt",
    }


def test_a_folder_without_an_init_is_a_package_too(beside: Path) -> None:
    (beside / "lagom_space").mkdir()
    (beside / "lagom_space" / "part.py").write_text("")
    assert "lagom_space/part.py" in names(function_of("def train():\n    import lagom_space.part"))


def test_sources_are_decoded_as_python_decodes_them(beside: Path) -> None:
    text = "# -*- coding: latin-1 -*-\nx = '\xe9'\n"
    (beside / "lagom_latin.py").write_bytes(text.encode("latin-1"))
    (beside / "lagom_no_text.py").write_bytes(b"x = '\xe9'\n")
    function = function_of("def train():\n    import lagom_latin\n    import lagom_no_text")
    assert source_files(function) == {str(beside / "lagom_latin.py"): text}


def test_a_relative_import_is_of_the_functions_own_package(beside: Path) -> None:
    package = beside / "lagom_family"
    package.mkdir()
    loaded = "def train():\n    from . import lagom_one\n    from .lagom_two import x\n    from ... import lagom_far\n"
    (package / "__init__.py").write_text(loaded)
    for name in ("lagom_one.py", "lagom_two.py"):
        (package / name).write_text("x = 1\n")
        (beside / name).write_text("x = 2\n")
    function = importlib.import_module("lagom_family").train
    assert source_files(function) == {
        str(package / name): (package / name).read_text() for name in ("__init__.py", "lagom_one.py", "lagom_two.py")
    }
    assert {name for name in names(function) if name.startswith("lagom_")} == {
        f"lagom_family/{name}" for name in ("__init__.py", "lagom_one.py", "lagom_two.py")
    }


def test_a_module_with_a_syntax_error_travels_all_the_same(beside: Path) -> None:
    (beside / "lagom_broken.py").write_text("def (:\n")
    assert "lagom_broken.py" in names(function_of("def train():\n    import lagom_broken"))


def test_what_does_not_exist_is_left_to_the_rank_to_say() -> None:
    names(function_of("def train():\n    import lagom_nowhere"))


def test_python_installed_packages_and_lagom_do_not_travel() -> None:
    source = "def train():\n    import json, torch, numpy.linalg, lagom, sys, cloudpickle"
    tops = {name.split("/")[0].removesuffix(".py") for name in names(function_of(source))}
    assert not tops & {"json", "torch", "numpy", "lagom", "sys", "cloudpickle", "pytest", "_pytest"}
    for module in (io, pytest, importlib.import_module("torch")):
        assert is_installed(str(module.__file__))
    assert not is_installed(__file__)


def test_modules_with_broken_faces_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hostile(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    monkeypatch.setitem(sys.modules, "lagom_hostile", Hostile("lagom_hostile"))
    monkeypatch.setitem(sys.modules, "lagom_none", None)
    names(lambda: None)


def test_equal_content_gives_an_equal_archive_and_other_content_another(beside: Path) -> None:
    path = beside / "lagom_dated.py"
    function = function_of("def train():\n    import lagom_dated")
    path.write_text("x = 1\n")
    first = modules_zip(function)
    path.write_text("x = 1\n")
    path.touch()
    assert modules_zip(function) == first
    path.write_text("x = 2\n")
    assert modules_zip(function) != first


def test_lagom_and_the_cloudpickle_beside_it_are_in_lagoms_own_archive(tmp_path: Path) -> None:
    found = zipfile.ZipFile(io.BytesIO(lagom_zip())).namelist()
    assert {"lagom/__init__.py", "lagom/on_rank/bootstrap.py", "cloudpickle/__init__.py"} <= set(found)
    assert not any("__pycache__" in name for name in found)


def refuse(*_: Any) -> Any:
    raise NotImplementedError


class Meta(type):
    __eq__ = __hash__ = __instancecheck__ = refuse

    def __getattribute__(cls, name: str) -> Any:
        raise NotImplementedError(name)


class Refusing(metaclass=Meta):
    __class__ = property(refuse)
    __eq__ = __len__ = __iter__ = __bool__ = __hash__ = __getattribute__ = refuse


REFUSING: Any = Refusing()


def test_objects_that_refuse_every_look_are_passed_over() -> None:
    def function() -> Any:
        return REFUSING, Refusing

    assert str(Path(__file__)) in source_files(function)
    assert modules_zip(function)
