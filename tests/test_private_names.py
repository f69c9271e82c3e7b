"""Tests judge by behaviour: few of them name what is private in lagom, so that its code can be changed without them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.sources import ROOT, trees, without_collections

MOST = 7
"""Uses of private names of lagom in tests. This number only falls."""
OF_OTHERS = {
    "_base",
    "_clear",
    "_dataset_fetcher",
    "_device_types",
    "_devices",
    "_iterator",
    "_native",
    "_pid",
}
OF_OTHERS |= {
    "_is_running_on_worker",
    "_repr_html_",
    "_root_directory",
    "_step",
    "_meta",
    "_threads",
    "_timeout",
    "_Unpickler",
    "_version",
    "_workers",
    "_world",
}
"""Names of Python's, torch's, PySpark's, Jupyter's and W&B's, and of the compiled part, that lagom has too."""
_PRIVATE = re.compile(r"\b_(?!_)\w+")
_READ = re.compile(r"""(?:(?<!\bself)\.\s*|["'])(_(?!_)\w+)""")
_IMPORT = re.compile(r"from\s+lagom[\w.]*\s+import\s+(?:\([^)]*\)|.*)")


@without_collections()
def test_few_tests_name_what_is_private() -> None:
    private = {name for tree in trees("lagom") for name in defined(tree)}
    private = {name for name in private if _PRIVATE.fullmatch(name)} - OF_OTHERS
    assert len(private) > 1000
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if private.intersection(_perhaps_used(text := path.read_text()))  # parsing takes most of the time
        for line, name in used(ast.parse(text), private)
    ]
    assert len(found) <= MOST, "judge by behaviour, or give the room a public name:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from lagom.data import _x",
        "module._x",
        "module._x()",
        "session.one._x.two",
        "monkeypatch.setattr(module, '_x', 3)",
        "monkeypatch.setattr('lagom.extensions.data._x', 3)",
        "PROGRAM = 'import lagom; lagom.program.signature()._x'",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert _perhaps_used(source) == {"_x"}
    assert list(used(ast.parse(source), {"_x"})) == [(1, "_x")]


@pytest.mark.parametrize("source", ["_x = 3", "self._x", "from torch import _x", "'of _x it says'", "module._other"])
def test_others_are_not(source: str) -> None:
    assert list(used(ast.parse(source), {"_x"})) == []


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a module gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _perhaps_used(text: str) -> set[str]:
    """Names among which are all that ``used`` finds in ``text``: after a dot or a quote, or imported."""
    imported = " ".join(_IMPORT.findall(text))
    return {*_READ.findall(text), *_PRIVATE.findall(imported)}


def used(tree: ast.AST, private: set[str]) -> Iterator[tuple[int, str]]:
    """Lines and names of ``private`` that a test imports, reads of another object, or names in a text."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lagom"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names = [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [re.sub(r"^lagom\.[\w.]*\.", "", node.value)]
            if "import lagom" in node.value or "from lagom" in node.value:  # a program
                names += re.findall(r"(?<!self)\.(_\w+)", node.value)
        yield from ((getattr(node, "lineno", 0), name) for name in names if name in private)
