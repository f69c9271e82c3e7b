"""``SourceFile``: a source file of the user, compiled anew so that the iterators of loops can be read from a frame.

The value stack of a running frame cannot be read in Python. On it lie the iterator of a ``for`` loop and the manager
of a ``with`` block, which the rest of the function needs. So each iterator and manager gets a local variable, whose
name no program can have. Those of a script's own statements are in a dict beside the script's variables: these are
global, and a program may list them.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

MARK = "lagom "
"""Begins the names of lagom's own variables in a program's functions; no identifier of a program has a space."""
_ITER, _HELD, _KEEP, _KEPT = f"{MARK}iter", f"{MARK}held", f"{MARK}keep", f"{MARK}kept"
Function = ast.FunctionDef | ast.Module
"""A function, or the script itself."""
SCRIPT = "<module>"
"""Python's name for the code of a script."""
Span = tuple[int, int, int, int]
"""Line and column at which a part of the source begins, and those at which it ends."""
_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def iterator_name(loop: ast.For) -> str:
    """Return the name of the variable that holds the iterator of ``loop``."""
    return f"{MARK}{loop.lineno}:{loop.col_offset}"


def manager_name(block: ast.With, number: int) -> str:
    """Return the name of the variable that holds a context manager of ``block``."""
    return f"{MARK}{block.lineno}:{block.col_offset}:{number}"


def in_words(name: str) -> str:
    """Describe a variable for the user: by its name, or by the line of the loop or block that it belongs to."""
    return f"loop or block of line {name[len(MARK) :].partition(':')[0]}" if name.startswith(MARK) else name


def name_at(name: str, node: ast.AST) -> ast.Name:
    """Return an expression that reads the variable ``name``, at the position of ``node``."""
    return ast.copy_location(ast.Name(name, ast.Load()), node)


class HeldIterator:
    """Gives a loop its iterator without a second call of the iterator's ``__iter__``, which may shuffle."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self.iterator


def held(iterator: Iterator[Any]) -> Iterable[Any]:
    """Return ``iterator`` for a loop, as a ``HeldIterator`` unless its ``__iter__`` is in C, where it has no effect."""
    is_c = isinstance(getattr(type(iterator), "__iter__", None), types.WrapperDescriptorType)
    return iterator if is_c else HeldIterator(iterator)


def iterator_of(value: Any) -> Any:
    """Return the iterator in the variable of a loop."""
    return value.iterator if type(value) is HeldIterator else value


class LocalVariables:
    """Makes code that keeps iterators and managers in local variables of the function that uses them."""

    def keep(self, name: str, value: ast.expr) -> ast.expr:
        """Return an expression that gives ``name`` the value."""
        target = ast.copy_location(ast.Name(name, ast.Store()), value)
        return ast.copy_location(ast.NamedExpr(target, value), value)

    def read(self, name: str, node: ast.AST) -> ast.expr:
        """Return an expression that reads ``name``, at the position of ``node``."""
        return name_at(name, node)

    def target(self, name: str, node: ast.AST) -> ast.expr:
        """Return the target of a loop that gives ``name`` its values."""
        return ast.copy_location(ast.Name(name, ast.Store()), node)

    def clear(self, name: str, node: ast.AST) -> ast.stmt:
        """Return a statement that clears ``name``, whose value would else live longer than in the program itself."""
        return ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)), node)


class ScriptVariables(LocalVariables):
    """Makes code that keeps iterators and managers of a script's own statements in a dict beside its global variables.

    So a program that lists its globals does not see them.
    """

    kept: ClassVar[dict[str, Any]] = {}
    """The iterators and managers of the script of this process."""

    def keep(self, name: str, value: ast.expr) -> ast.expr:
        key = ast.copy_location(ast.Constant(name), value)
        return ast.copy_location(ast.Call(name_at(_KEEP, value), [key, value], []), value)

    def read(self, name: str, node: ast.AST) -> ast.expr:
        key = ast.copy_location(ast.Constant(name), node)
        return ast.copy_location(ast.Subscript(name_at(_KEPT, node), key, ast.Load()), node)

    def target(self, name: str, node: ast.AST) -> ast.expr:
        key = ast.copy_location(ast.Constant(name), node)
        return ast.copy_location(ast.Subscript(name_at(_KEPT, node), key, ast.Store()), node)

    def clear(self, name: str, node: ast.AST) -> ast.stmt:
        nothing = ast.copy_location(ast.Constant(None), node)
        return ast.copy_location(ast.Expr(self.keep(name, nothing)), node)


def _keep(name: str, value: Any) -> Any:
    ScriptVariables.kept[name] = value
    return value


LOCAL, OF_SCRIPT = LocalVariables(), ScriptVariables()


def make_known() -> None:
    """Put lagom's functions and dict that the code of ``NamedStack`` uses into ``builtins``."""
    names = {_ITER: iter, _HELD: held, _KEEP: _keep, _KEPT: ScriptVariables.kept}
    for name, value in names.items():
        setattr(builtins, name, value)


class NamedStack(ast.NodeTransformer):
    """Gives each iterator and each context manager a variable.

    In functions it is a local variable, in the file's own statements one of ``variables``. The file's own statements
    stay as they are if ``variables`` is None; those of classes, and functions that list their variables, always do.
    """

    def __init__(self, variables: LocalVariables | None = None) -> None:
        self._variables = variables

    def _visit_scope(self, node: ast.AST, variables: LocalVariables | None) -> ast.AST:
        if _lists_variables(node):
            return node
        before, self._variables = self._variables, variables
        self.generic_visit(node)
        self._variables = before
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit_scope(node, LOCAL)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._visit_scope(node, LOCAL)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._visit_scope(node, None)

    def visit_For(self, node: ast.For) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if self._variables is None:
            return node
        name = iterator_name(node)
        made = _called(_HELD, _called(_ITER, node.iter))
        node.iter = self._variables.keep(name, made)
        return [node, self._cleared(name, node)]

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if self._variables is None:
            return node
        names = [manager_name(node, number) for number in range(len(node.items))]
        for name, item in zip(names, node.items, strict=True):
            item.context_expr = self._variables.keep(name, item.context_expr)
        return [node, *(self._cleared(name, node) for name in (*names, *names_in(node.body)))]

    def visit_Try(self, node: ast.Try | ast.TryStar) -> ast.AST:
        self.generic_visit(node)
        if self._variables is not None:
            clear_left(self._variables, node)
        return node

    def visit_TryStar(self, node: ast.TryStar) -> ast.AST:
        return self.visit_Try(node)

    def _cleared(self, name: str, node: ast.stmt) -> ast.stmt:
        assert self._variables is not None
        found = self._variables.clear(name, node)
        found.end_lineno, found.end_col_offset = node.lineno, node.col_offset
        return ast.fix_missing_locations(found)


def names_in(statements: Iterable[ast.stmt]) -> list[str]:
    """Return the variables for the iterators and managers of ``statements``, without functions and classes in them."""
    names, waiting = list[str](), list[ast.AST](statements)
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Scope):
            continue
        if isinstance(node, ast.For):
            names.append(iterator_name(node))
        elif isinstance(node, ast.With):
            names += [manager_name(node, number) for number in range(len(node.items))]
        waiting += ast.iter_child_nodes(node)
    return names


def clear_left(variables: LocalVariables, node: ast.Try | ast.TryStar) -> None:
    """Have the handlers of ``node`` first clear the variables of loops and blocks that an exception has left.

    So generators and workers end as in the program itself. A ``finally`` clears the variables too.
    """
    names = names_in([*node.body, *node.orelse])
    for handler in node.handlers:
        handler.body = [*(variables.clear(name, node) for name in names), *handler.body]
    if node.finalbody:
        names += names_in(one for handler in node.handlers for one in handler.body)
        node.finalbody = [*(variables.clear(name, node) for name in names), *node.finalbody]


def _lists_variables(function: ast.AST) -> bool:
    """Return whether ``function`` lists its variables, as by ``locals()``, so that it must not get others."""
    return isinstance(function, ast.FunctionDef) and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("locals", "vars", "dir")
        and not node.args
        for node in ast.walk(function)
    )


def _called(name: str, argument: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(name_at(name, argument), [argument], []), argument)


class SourceFile:
    """One source file of the program: its tree, and where each node stands in it.

    Args:
        name: the file name that its code objects have.
        is_script: whether the file is a script, whose own statements may be in progress too.
        flags: of ``compile``, for the future imports that hold in it.

    Raises:
        SyntaxError: if ``text`` cannot be parsed.
    """

    def __init__(self, name: str, text: str, is_script: bool = False, flags: int = 0) -> None:
        self.name, self.text, self._flags = name, text, flags
        self.variables = OF_SCRIPT if is_script else None
        self.tree = ast.parse(text, name)
        self.parents: dict[ast.AST, tuple[ast.AST, str, int | None]] = {}
        self._functions: dict[tuple[str, int], ast.FunctionDef] = {}
        self._calls: dict[tuple[int, int], ast.Call] = {}
        self._loops: dict[Span, ast.For] = {}
        self._index()

    def _index(self) -> None:
        for node in ast.walk(self.tree):
            for field, value in ast.iter_fields(node):
                for index, child in enumerate(value if isinstance(value, list) else [value]):
                    if isinstance(child, ast.AST):
                        self.parents[child] = node, field, index if isinstance(value, list) else None
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                # A continuation, which is not decorated again, begins at the second of these lines.
                self._functions[node.name, first] = self._functions[node.name, node.lineno] = node
            elif isinstance(node, ast.Call):
                self._calls[span(node)[2:]] = node  # no other call ends with the same parenthesis
            elif isinstance(node, ast.For):
                # Python 3.11 gives the loop's own code its position, later versions that of its iterable.
                self._loops[span(node)] = self._loops[span(node.iter)] = node

    def function(self, code: types.CodeType) -> Function | None:
        """Return the function that ``code`` was compiled from, or the script; None if the file has none."""
        return self.function_at(code.co_name, code.co_firstlineno)

    def function_at(self, name: str, first_line: int) -> Function | None:
        """Return the function ``name`` that begins at ``first_line``, or the script; None if the file has none."""
        if name == SCRIPT:
            return self.tree if self.variables is not None else None
        return self._functions.get((name, first_line))

    def call_at(self, where: Span) -> ast.Call | None:
        """Return the call that ends where ``where`` ends; its code may begin later, at the name of a method."""
        return self._calls.get(where[2:])

    def loop_at(self, where: Span) -> ast.For | None:
        """Return the ``for`` loop whose code has the position ``where``."""
        return self._loops.get(where)

    def is_of(self, code: types.CodeType) -> bool:
        """Return whether ``code`` was compiled from this source, as it is now."""
        place = code.co_qualname, code.co_firstlineno
        found = self._plain.get(place)
        return found is not None and _parts(code) in (_parts(found), _parts(self._apart.get(place, found)))

    def chain(self, node: ast.AST, function: Function) -> list[ast.AST] | None:
        """Return the nodes from ``function`` down to ``node``; None if another function or class is between."""
        found = [node]
        while found[-1] is not function:
            parent = self.parents.get(found[-1])
            if parent is None or (parent[0] is not function and isinstance(parent[0], _Scope)):
                return None
            found.append(parent[0])
        return found[::-1]

    @functools.cached_property
    def _plain(self) -> dict[tuple[str, int], types.CodeType]:
        """The code of each function by name and first line, as Python compiles the whole file."""
        found = codes(self.compiled(self.tree))
        return {(code.co_qualname, code.co_firstlineno): code for code in found}

    @functools.cached_property
    def _apart(self) -> dict[tuple[str, int], types.CodeType]:
        """The code of each function by name and first line, as Python compiles the statements of the file one by one.

        Notebooks compile the statements of a cell so. Python generates other code for the call ``torch.rand()`` where
        it sees ``import torch``.
        """
        futures = [one for one in self.tree.body if isinstance(one, ast.ImportFrom) and one.module == "__future__"]
        trees = [ast.Module([*futures, one], []) for one in self.tree.body if one not in futures]
        found = itertools.chain.from_iterable(codes(self.compiled(tree)) for tree in trees)
        return {(code.co_qualname, code.co_firstlineno): code for code in found}

    @functools.cached_property
    def with_named_stack(self) -> dict[tuple[str, int], types.CodeType]:
        """The code of all functions, with a variable for each iterator and manager, by name and first line."""
        return {(code.co_qualname, code.co_firstlineno): code for code in codes(self.module_code)}

    @functools.cached_property
    def module_code(self) -> types.CodeType:
        """The code of the file, with a variable for each iterator and manager."""
        tree = NamedStack(self.variables).visit(ast.parse(self.text, self.name))
        return self.compiled(tree)

    def compiled(self, tree: Any) -> types.CodeType:
        """Compile a tree made from the source, without the warnings that Python has shown for the source before."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fixed = ast.fix_missing_locations(tree)
            found: types.CodeType = compile(fixed, self.name, "exec", self._flags, dont_inherit=True)
            return found


def _parts(code: types.CodeType) -> tuple[Any, ...]:
    own = [one for one in code.co_consts if not isinstance(one, types.CodeType)]
    return code.co_code, code.co_names, code.co_varnames, own


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield ``code``, and the code of all that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def span(node: ast.expr | ast.stmt) -> Span:
    """Return where ``node`` begins and ends."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
