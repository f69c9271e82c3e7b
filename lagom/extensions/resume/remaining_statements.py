"""``Rest``: what is left of a function from a node of its source on, as statements."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lagom.extensions.resume.frame_position import NoSnapshotError
from lagom.extensions.resume.source_code import (
    LOCAL,
    MARK,
    OF_SCRIPT,
    Function,
    NamedStack,
    SourceFile,
    clear_left,
    iterator_name,
    manager_name,
    name_at,
    names_in,
)

HELP = f"{MARK}resumed"
"""Parameter of a continuation that holds its ``ResumedFrame``; for the rest of a script, a name in ``builtins``."""
_ITEM = f"{MARK}item "
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Assert, ast.Raise, ast.Delete)


class _Undeclared(ast.NodeTransformer):
    """Drops a function's declarations, which are moved to its beginning, and the annotations of its variables.

    Python allows no annotation of a nonlocal variable, and a function does not compute annotations anyway. A script
    keeps its annotations.
    """

    def __init__(self, *, is_function: bool) -> None:
        self._is_function = is_function

    def visit_Global(self, node: ast.Global) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if not self._is_function:
            return node
        plain = ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
        return ast.copy_location(plain, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node


class Rest:
    """Builds what is left of a function, or of a script, from a node on."""

    def __init__(self, source: SourceFile, function: Function, node: ast.AST, is_innermost: bool) -> None:
        self._source, self._node, self._is_innermost = source, node, is_innermost
        self._name = function.name if isinstance(function, ast.FunctionDef) else "the script"
        self._stack = LOCAL if isinstance(function, ast.FunctionDef) else OF_SCRIPT
        self._locals = _local_names(function)
        chain = source.chain(node, function)
        if chain is None:
            raise NoSnapshotError(f"{self._name} is inside of a lambda or a class body")
        self._chain: Sequence[ast.AST] = chain
        self.read: set[str] = set()
        """Variables that have to hold plain values; see ``check_continuation``."""

    def statements(self) -> list[ast.stmt]:
        return self._block(1)

    def _block(self, depth: int) -> list[ast.stmt]:
        """Return the rest of the block that has the node at ``depth`` of the chain."""
        node = self._chain[depth]
        parent, field, index = self._source.parents[node]
        assert index is not None
        return [*self._statement(depth), *self._whole(getattr(parent, field)[index + 1 :])]

    def _whole(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        """Return copies of ``statements`` with variables for their iterators and managers, and without declarations."""
        block = ast.Module([copy.deepcopy(one) for one in statements], [])
        found: list[ast.stmt] = (
            NamedStack(self._stack).visit(_Undeclared(is_function=self._stack is LOCAL).visit(block)).body
        )
        return found

    def _statement(self, depth: int) -> list[ast.stmt]:
        node = self._chain[depth]
        if node is self._node:
            assert isinstance(node, ast.For)
            return self._loop(node, self._stack.read(iterator_name(node), node.iter))
        child = self._chain[depth + 1]
        field = self._source.parents[child][1]
        if isinstance(node, _SIMPLE):
            return self._whole([self._with_call(node, depth)])
        find = getattr(self, f"_in_{type(node).__name__.lower()}", None)
        statements: list[ast.stmt] | None = find(node, field, depth) if find is not None else None
        if statements is None:
            line = getattr(node, "lineno", 0)
            raise NoSnapshotError(f"{self._name} is inside of a statement at line {line} that cannot be resumed")
        return statements

    def _loop(self, node: ast.For, iterator: ast.expr) -> list[ast.stmt]:
        """Return ``node`` over an ``iterator`` that is in its variable already."""
        loop = copy.copy(node)
        loop.target, loop.iter = copy.deepcopy(node.target), iterator
        loop.body, loop.orelse = self._whole(node.body), self._whole(node.orelse)
        return [loop, self._stack.clear(iterator_name(node), node)]

    def _in_if(self, node: ast.If, field: str, depth: int) -> list[ast.stmt] | None:
        if field == "test":
            return self._whole([self._with_call(node, depth)])
        return self._block(depth + 1)

    def _in_for(self, node: ast.For, field: str, depth: int) -> list[ast.stmt] | None:
        if field == "iter":
            return self._whole([self._with_call(node, depth)])
        if field == "orelse":
            return self._block(depth + 1)
        item = f"{_ITEM}{depth}"
        items = ast.Call(self._help("items", node.iter), [self._stack.read(iterator_name(node), node.iter)], [])
        test = ast.Compare(self._stack.read(item, node.iter), [ast.Is()], [self._help("FIRST", node.iter)])
        assign = ast.Assign([copy.deepcopy(node.target)], self._stack.read(item, node.target))
        body = ast.If(test, self._block(depth + 1), [ast.copy_location(assign, node.target), *self._whole(node.body)])
        target = self._stack.target(item, node.target)
        loop = ast.For(
            target, ast.copy_location(items, node.iter), [_at_head(body, node)], self._whole(node.orelse), None
        )
        return [ast.copy_location(loop, node), self._stack.clear(iterator_name(node), node)]

    def _in_while(self, node: ast.While, field: str, depth: int) -> list[ast.stmt] | None:
        if field == "orelse":
            return self._block(depth + 1)
        again = ast.Constant(f"{node.lineno}:{node.col_offset}")
        first = ast.Call(self._help("first", node.test), [ast.copy_location(again, node.test)], [])
        ast.copy_location(first, node.test)
        loop = copy.copy(node)
        loop.orelse = self._whole(node.orelse)
        if field == "test":
            test = self._with_call(node, depth).test
            loop.test = ast.copy_location(ast.IfExp(first, test, copy.deepcopy(node.test)), node.test)
            loop.body = self._whole(node.body)
            return [loop]
        flag = f"{_ITEM}{depth}"
        loop.test = ast.BoolOp(ast.Or(), [self._stack.keep(flag, first), copy.deepcopy(node.test)])
        ast.copy_location(loop.test, node.test)
        body = ast.If(self._stack.read(flag, node.test), self._block(depth + 1), self._whole(node.body))
        loop.body = [_at_head(body, node)]
        return [loop]

    def _in_with(self, node: ast.With, field: str, depth: int) -> list[ast.stmt] | None:
        if field == "items":
            if self._chain[depth + 1] is not node.items[0]:
                return None
            return self._whole([self._with_call(node, depth)])
        body = self._block(depth + 1)
        names = [manager_name(node, number) for number in range(len(node.items))]
        block = copy.copy(node)
        block.items = [
            ast.withitem(
                ast.copy_location(ast.Call(self._help("entered", node), [self._stack.read(name, node)], []), node)
            )
            for name in names
        ]
        block.body = body
        return [block, *(self._stack.clear(name, node) for name in (*names, *names_in(node.body)))]

    def _in_try(self, node: ast.Try, field: str, depth: int) -> list[ast.stmt] | None:
        if field not in ("body", "orelse"):
            return None
        block = copy.copy(node)
        block.finalbody = self._whole(node.finalbody)
        if field == "orelse":
            block.handlers, block.orelse = [], []
            body = self._block(depth + 1)
            if not block.finalbody:
                return body
            block.body = body
            clear_left(self._stack, block)
            return [block]
        block.body = self._block(depth + 1)
        handlers = [copy.copy(one) for one in node.handlers]
        for one in handlers:
            one.body = self._whole(one.body)
        block.handlers, block.orelse = handlers, self._whole(node.orelse)
        clear_left(self._stack, block)
        return [block]

    def _in_match(self, node: ast.Match, field: str, depth: int) -> list[ast.stmt] | None:
        if field != "cases" or self._source.parents[self._chain[depth + 2]][1] != "body":
            return None
        return self._block(depth + 2)

    def _help(self, attribute: str, node: ast.AST) -> ast.expr:
        return ast.copy_location(ast.Attribute(name_at(HELP, node), attribute, ast.Load()), node)

    def _with_call(self, statement: ast.AST, depth: int) -> Any:
        """Return a copy of ``statement`` whose call in progress goes on; in the innermost function it is made again.

        Raises:
            NoSnapshotError: if the statement has computed something before the call, which would be done once more.
        """
        self._check_order(depth)
        found: Mapping[int, ast.AST] = {id(self._node): self._resumed_call()}
        return copy.deepcopy(statement, dict(found))

    def _resumed_call(self) -> ast.AST:
        if self._is_innermost:
            return copy.deepcopy(self._node)
        return ast.copy_location(ast.Call(self._help("call", self._node), [], []), self._node)

    def _check_order(self, depth: int) -> None:
        statement = self._chain[depth]
        if isinstance(statement, ast.AugAssign) and not self._is_fixed(statement.target):
            raise NoSnapshotError(f"line {statement.lineno} has read {ast.unparse(statement.target)} before its call")
        for parent, child in itertools.pairwise(self._chain[depth:]):
            for before in _evaluated_before(parent, child):
                is_callee = isinstance(parent, ast.Call) and before is parent.func
                if not (_is_reference(before) if is_callee else self._is_fixed(before)):
                    line = getattr(before, "lineno", 0)
                    raise NoSnapshotError(f"line {line} has computed {ast.unparse(before)} before its call")
                if isinstance(parent, (ast.BoolOp, ast.IfExp, ast.Compare)):
                    self.read |= _names(before)
        call = self._node
        if self._is_innermost and isinstance(call, ast.Call) and not all(map(_is_reference, [call.func, *call.args])):
            raise NoSnapshotError(f"line {call.lineno} would compute the arguments of a call again")

    def _is_fixed(self, node: ast.AST) -> bool:
        """Return whether no call can change the value of ``node``; add the variables to ``read`` that must be plain."""
        if isinstance(node, (ast.Tuple, ast.List, ast.JoinedStr)):
            return all(map(self._is_fixed, getattr(node, "elts", None) or getattr(node, "values", [])))
        if isinstance(node, ast.keyword):
            return self._is_fixed(node.value)
        if isinstance(node, (ast.FormattedValue, ast.UnaryOp)):
            self.read |= _names(node)
            return self._is_fixed(node.value if isinstance(node, ast.FormattedValue) else node.operand)
        if isinstance(node, ast.Compare):
            self.read |= _names(node)
            return all(map(self._is_fixed, (node.left, *node.comparators)))
        return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in self._locals)


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _is_reference(node: ast.AST) -> bool:
    """Return whether an expression names an object, such as ``self.losses.append``."""
    if isinstance(node, ast.Attribute):
        return _is_reference(node.value)
    if isinstance(node, ast.Subscript):
        return _is_reference(node.value) and isinstance(node.slice, (ast.Constant, ast.Name))
    return isinstance(node, (ast.Name, ast.Constant))


def _local_names(function: Function) -> set[str]:
    """Return the variables that only ``function`` itself changes."""
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if isinstance(function, ast.FunctionDef):
        names |= {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    declared = [node for node in ast.walk(function) if isinstance(node, (ast.Global, ast.Nonlocal))]
    return names - {name for one in declared for name in one.names}


_TARGETS = ("targets", "target", "annotation", "body", "orelse", "handlers", "finalbody", "optional_vars")


def _evaluated_before(parent: ast.AST, child: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions in ``parent`` that are computed before ``child``; a condition counts as well."""
    if isinstance(parent, ast.IfExp) and child is not parent.test:
        yield parent.test
        return
    fields = ["keys", "values"] if isinstance(parent, ast.Dict) else [f for f in parent._fields if f not in _TARGETS]
    if isinstance(parent, (ast.IfExp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return
    for field in fields:
        value = getattr(parent, field, None)
        for one in value if isinstance(value, list) else [value]:
            if one is child:
                return
            if isinstance(one, ast.keyword):
                yield one.value
            elif isinstance(one, ast.expr):
                yield one


def _at_head(node: ast.If, loop: ast.stmt) -> ast.If:
    """Give ``node`` the position of ``loop``; return it."""
    ast.copy_location(node, loop)
    return node
