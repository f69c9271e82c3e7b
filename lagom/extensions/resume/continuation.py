"""``continuation_code``, ``script_code``: compile the rest of a function or of a script from a position on.

What is left of each statement around the position is kept: a loop goes on with its iterator, a ``with`` block leaves
its manager at its end, a ``try`` still has its handlers. So ``break``, ``else`` and ``return`` mean the same.
"""

from __future__ import annotations

import ast
import copy
import itertools
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from lagom.extensions.resume.remaining_statements import HELP, Rest
from lagom.extensions.resume.source_code import LOCAL, MARK, Function, SourceFile, codes, name_at

_REST = f"{MARK}rest"


class ResumedFrame:
    """Gives the rest of a function (its continuation) the function's variables, iterators, managers and inner call."""

    FIRST = object()
    """Stands for the item that a loop was at."""

    def __init__(self, values: dict[str, Any], call: Callable[[], Any] | None) -> None:
        self._values = values
        self.call = call
        """Returns the value of the call in progress; None in the innermost function, which makes its call again."""
        self._passed: set[str] = set()

    def take(self, name: str) -> Any:
        """Return the value of the local variable ``name``, and forget it: the function holds it from now on."""
        return self._values.pop(name)

    def items(self, iterator: Iterable[Any]) -> Iterator[Any]:
        """Return the rest of a loop's items: ``FIRST`` for the one that the loop was at, and then the others."""
        return itertools.chain((self.FIRST,), iterator)

    def first(self, place: str) -> bool:
        """Return True at the first call for each ``place``, a loop of the function."""
        is_first = place not in self._passed
        self._passed.add(place)
        return is_first

    def entered(self, manager: Any) -> EnteredManager:
        """Return a manager for a block that the program has entered before."""
        return EnteredManager(manager)


class EnteredManager:
    """A context manager that has been entered before: it is not entered again, only left at the end of its block."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> Any:
        return type(self._manager).__exit__(self._manager, *error)


def check_continuation(source: SourceFile, function: Function, node: ast.AST, is_innermost: bool) -> set[str]:
    """Check that ``function`` can go on from ``node``; return the variables that have to hold plain values for it.

    The statement at ``node`` has read these variables before its call, in an f-string, a condition, a comparison or a
    unary operation, and reads them again. So no call may have changed the values that they hold.

    Args:
        is_innermost: as for ``continuation_code``.

    Raises:
        NoSnapshotError: if it cannot.
    """
    rest = Rest(source, function, node, is_innermost)
    rest.statements()
    return rest.read


def continuation_code(
    source: SourceFile,
    function: ast.FunctionDef,
    node: ast.AST,
    is_innermost: bool,
    names: Collection[str],
    cells: Collection[str],
) -> types.CodeType:
    """Compile the rest of ``function`` from ``node`` on, as a function of a ``ResumedFrame``.

    Args:
        is_innermost: whether a call at ``node`` is made again; else the function that it has called goes on.
        names: local variables that have a value.
        cells: variables that ``function`` shares with other functions; they become free variables.
    """
    rest = Rest(source, function, node, is_innermost).statements()
    declared: list[ast.stmt] = list(_declarations(function))
    known = {name for one in _declarations(function) for name in one.names} | {"__class__"}
    shared = [name for name in cells if name not in known]
    if shared:
        declared.append(ast.copy_location(ast.Nonlocal(shared), function))
    changed: Any = copy.copy(function)
    changed.args = _parameters(*first_parameter(function, cells), HELP)
    changed.name = _REST  # so that the own name of a recursive function means the program's
    changed.decorator_list, changed.returns = [], None
    changed.body = [
        *declared,
        *(_taken(name, function) for name in names if name not in first_parameter(function, cells)),
        *rest,
    ]
    outer = copy.copy(changed)
    outer.name, outer.args = f"{MARK}cells", _parameters()
    outer.body = [*(LOCAL.clear(name, function) for name in shared), changed]
    if hasattr(function, "type_params"):
        changed.type_params, outer.type_params = [], []
    tree = _with_replaced(source, function, outer)
    rest_code = next(code for code in codes(source.compiled(tree)) if code.co_name == _REST)
    return rest_code.replace(co_name=function.name)


def script_code(source: SourceFile, node: ast.AST, is_innermost: bool) -> types.CodeType:
    """Compile the rest of a script from ``node`` on; the code finds its ``ResumedFrame`` as ``HELP`` in builtins."""
    rest = Rest(source, source.tree, node, is_innermost).statements()
    return source.compiled(ast.Module([*_futures(source.tree), *rest], []))


def first_parameter(function: ast.FunctionDef, cells: Collection[str]) -> list[str]:
    """Return the first parameter of a function that uses ``super()``, which reads the first argument; else nothing."""
    given = [*function.args.posonlyargs, *function.args.args]
    return [given[0].arg] if "__class__" in cells and given else []


def _parameters(*names: str) -> ast.arguments:
    return ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])


def _taken(name: str, node: ast.AST) -> ast.stmt:
    """Return a statement that gives the variable ``name`` its value."""
    take = ast.Attribute(name_at(HELP, node), "take", ast.Load())
    value = ast.Call(take, [ast.Constant(name)], [])
    return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), node)


def _with_replaced(source: SourceFile, function: ast.FunctionDef, new: ast.stmt) -> ast.AST:
    """Return a tree with ``new`` in place of ``function``; of other top-level statements it has only future imports."""
    child: ast.stmt = function
    replacement: ast.AST = new
    while True:
        parent, field, _ = source.parents[child]
        above = copy.copy(parent)
        if isinstance(parent, ast.Module):
            above.body = [*_futures(parent), replacement]  # type: ignore[attr-defined]
            return above
        if isinstance(parent, (ast.FunctionDef, ast.ClassDef)):
            # The other statements of an enclosing function tell Python which names are its variables.
            siblings = [replacement if one is child else one for one in getattr(parent, field)]
            setattr(above, field, siblings)
        else:
            setattr(above, field, [replacement if one is child else one for one in getattr(parent, field)])
        child, replacement = parent, above  # type: ignore[assignment]


def _futures(tree: ast.Module) -> list[ast.stmt]:
    return [one for one in tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]


def _declarations(function: ast.FunctionDef) -> list[ast.Global | ast.Nonlocal]:
    """Return the ``global`` and ``nonlocal`` statements of ``function`` itself."""
    found: list[ast.Global | ast.Nonlocal] = []
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            found.append(node)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(node))
    return found
