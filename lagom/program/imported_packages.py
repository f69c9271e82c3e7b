"""``imported_packages``: the installed packages that a program imports, with their versions in this process.

See Note [Needed packages].
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib.metadata
import importlib.util
import inspect
import sys
import textwrap
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lagom.inspection.reads import bases, class_attributes, class_path, module_of
from lagom.plan import Package
from lagom.program.missing_packages import is_importable
from lagom.program.script import Script
from lagom.program.sources import (
    codes,
    imports_of,
    is_foreign,
    is_installed,
    is_own,
    own_root,
    reachable_modules,
    source_text,
    used_modules,
)

_NOT_COUNTED = {*sys.stdlib_module_names, *sys.builtin_module_names, "__main__", "__mp_main__", "lagom"}
_OF_SPARK = {"pyspark", "py4j"}
"""Packages that each executor of Spark has."""


def imported_packages(*values: Any, served: Collection[str] = (), for_executors: bool = False) -> tuple[Package, ...]:
    """Return the installed packages of this process that the code of ``values`` imports, or uses as modules.

    Args:
        values: the function, and what is pickled with it.
        served: top-level modules that lagom serves on ranks that lack them.
        for_executors: also find which packages are needed, what the user's own modules import, and the versions; the
            first time this may take tenths of a second.
    """
    program = _Needs()
    for value in values if for_executors else ():
        program.add_given(value)
    needed = program.names()
    possible = {name for value in reachable_modules(*values) for name in _modules_of(value)} | program.possible
    found = dict[str, bool]()
    for name in sorted(needed | possible):
        if name.partition(".")[0] not in {*_NOT_COUNTED, *served} and (module := _installed_module(name)):
            certain = name in needed and module.partition(".")[0] not in _OF_SPARK and _has_file(module)
            found[module] = found.get(module, False) or certain
    return tuple(_package(name, is_needed, for_executors) for name, is_needed in sorted(found.items()))


def _package(name: str, is_needed: bool, for_executors: bool) -> Package:
    distribution = distribution_of(name) if for_executors else None
    if distribution is None:
        return Package(name=name, is_needed=is_needed)
    return Package(
        name=name, distribution=distribution.metadata["Name"], version=distribution.version, is_needed=is_needed
    )


def distribution_of(module: str) -> importlib.metadata.Distribution | None:
    """Return the installed distribution that has ``module``; None if no installed distribution names it."""
    top = module.partition(".")[0]
    if "." not in module:
        try:
            return importlib.metadata.distribution(top)  # most have the name of their module
        except importlib.metadata.PackageNotFoundError:
            pass
    distributions = [importlib.metadata.distribution(name) for name in dict.fromkeys(_distributions().get(top, ()))]
    folder = module.replace(".", "/")
    for one in distributions if len(distributions) > 1 else ():
        if any(str(path).startswith((f"{folder}/", f"{folder}.")) for path in one.files or ()):
            return one
    return distributions[0] if distributions else None


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return {name: list(found) for name, found in importlib.metadata.packages_distributions().items()}


def _modules_of(value: Any) -> Iterator[str]:
    """Yield the modules that ``value``, a script or function, may import or use."""
    if isinstance(value, Script):
        yield from imports_of(value)
    elif isinstance(value, types.FunctionType) and not is_foreign(value):
        yield from imports_of(value)
        yield from (module.__name__ for module in used_modules(value))


def _installed_module(name: str) -> str:
    """Return the top-level module of ``name``, below namespace packages; "" for the user's own, or if not found."""
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        prefix = ".".join(parts[:number])
        if not is_importable(prefix):
            break
        if not _is_namespace(prefix):
            return prefix if own_root(parts[0]) is None else ""
    return parts[0] if is_importable(parts[0]) and own_root(parts[0]) is None else ""


def _is_namespace(name: str) -> bool:
    spec = _spec(name)
    return spec is not None and type(spec.submodule_search_locations).__name__ == "_NamespacePath"


def _has_file(name: str) -> bool:
    """Return whether ``name`` is a module of an installed package, and not one that a program has made."""
    spec = _spec(name)
    if spec is None:
        return False
    return any(is_installed(place) for place in (spec.origin, *(spec.submodule_search_locations or ())) if place)


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


@dataclass
class _Needs:
    """Collects the modules that are imported whenever a program is unpickled and run."""

    modules: set[str] = field(default_factory=set)
    """Modules that are imported, the user's own and others."""
    possible: set[str] = field(default_factory=set)
    """Modules that the user's own modules import on some conditions."""
    _seen: set[int] = field(default_factory=set)
    _given: list[Any] = field(default_factory=list)
    """Keeps given values, and so their ids."""

    def names(self) -> set[str]:
        """Return the modules, with those that the user's own modules import, at any depth."""
        waiting, imported = list(self.modules), set[str]()
        while waiting:
            name = waiting.pop()
            if name in imported:
                continue
            imported.add(name)
            if (own := _own_module(name)) is not None:
                path, package = own
                tree = _parsed(source_text(path) or "")
                waiting += _certain_imports(tree.body, package)
                self.possible |= set(_all_imports(tree, package))
        return imported

    def add_given(self, value: Any) -> None:
        """Add what is imported for ``value``, the function or one of its arguments, and by the function's first lines.

        The class of an instance is imported, too.
        """
        self._given.append(value)
        if isinstance(value, Script):
            for _, text in value.texts():
                self.modules |= set(_certain_imports(_parsed(text).body, value.package, is_main=True))
            if value.module:
                self.possible.add(value.module)
            return
        function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
        if isinstance(function, types.FunctionType) and not is_foreign(function):
            package = function.__globals__.get("__package__") or ""
            self.modules |= set(_certain_imports(_body_of(function), package))
        self._add(value if issubclass(type(value), _PICKLED) else type(value))

    def _add(self, value: Any) -> None:
        """Add the modules that unpickling ``value`` imports. Instances are left out."""
        kind = type(value)  # isinstance() would ask the object, too
        if id(value) in self._seen or not issubclass(kind, _PICKLED):
            return
        self._seen.add(id(value))
        if issubclass(kind, functools.partial):
            self._add_all((value.func, *value.args, *value.keywords.values()))
        elif issubclass(kind, types.MethodType):
            self._add_all((value.__func__, type(value.__self__)))
        elif issubclass(kind, (staticmethod, classmethod)):
            self._add(value.__func__)
        elif issubclass(kind, types.ModuleType):
            self.modules.add(value.__name__)
        elif issubclass(kind, types.BuiltinFunctionType) or not _travels_by_value(value):
            name = module_of(value) if issubclass(kind, type) else value.__module__
            self.modules |= {name} if type(name) is str else set()
        elif issubclass(kind, types.FunctionType):
            self._add_all(_globals_of(value))
        else:
            self._add_all((*class_attributes(value).values(), *bases(value)[1:]))

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._add(value)


_PICKLED = (
    functools.partial,
    types.MethodType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    staticmethod,
    classmethod,
    type,
)


def _travels_by_value(value: Any) -> bool:
    """Return whether cloudpickle pickles a function or class by its content, and not by its name."""
    is_class = issubclass(type(value), type)
    if not is_own(value) if is_class else is_foreign(value):
        return False
    module = module_of(value) if is_class else value.__module__
    name = class_path(value) if is_class else value.__qualname__
    return module in ("__main__", None) or module not in sys.modules or "<locals>" in name


def _globals_of(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values of those globals and closure variables that are pickled with ``function``."""
    names = {
        step.argval
        for code in codes(function.__code__)
        for step in dis.get_instructions(code)
        if step.opname == "LOAD_GLOBAL"
    }
    yield from (function.__globals__[name] for name in sorted(names) if name in function.__globals__)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            yield cell.cell_contents


def _own_module(name: str) -> tuple[Path, str] | None:
    """Return the file of the user's own module ``name`` and its package; None for another's, or without a file."""
    root = own_root(name.partition(".")[0])
    if root is None:
        return None
    path = root.parent / name.replace(".", "/")
    if (path / "__init__.py").is_file():
        return path / "__init__.py", name
    return (path.with_suffix(".py"), name.rpartition(".")[0]) if path.with_suffix(".py").is_file() else None


def _body_of(function: types.FunctionType) -> Sequence[ast.stmt]:
    """Return the statements of ``function``; none for a lambda, or without a source."""
    try:
        tree = _parsed(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ()
    first = tree.body[0] if tree.body else None
    return first.body if isinstance(first, ast.FunctionDef) else ()


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):  # a cell's magics; a rank raises the error, if it imports the module
        return ast.Module(body=[], type_ignores=[])


def _certain_imports(body: Iterable[ast.stmt], package: str, *, is_main: bool = False) -> Iterator[str]:
    """Yield the modules that the statements of ``body`` import whenever they run.

    Statements inside of others, such as ``if``, ``try`` and ``with``, do not count, but for the part of a script below
    ``if __name__ == "__main__"``; nor do those after a possible ``return`` or ``raise``.
    """
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from _names_in(statement, package)
        elif is_main and isinstance(statement, ast.If) and _is_main(statement):
            yield from _certain_imports(statement.body, package, is_main=is_main)
        if any(isinstance(node, (ast.Return, ast.Raise)) for node in _own_nodes(statement)):
            return


def _is_main(statement: ast.If) -> bool:
    return ast.unparse(statement.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _own_nodes(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of ``statement`` outside of functions and classes that it defines."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
        return
    yield statement
    for child in ast.iter_child_nodes(statement):
        yield from _own_nodes(child)


def _all_imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from _names_in(node, package)


def _names_in(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    """Yield the modules that ``node`` imports, and names from modules, which may be modules too."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    try:
        module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:  # the rank raises the error if it reaches the import
        return
    if module != "__future__":
        yield module
        yield from (f"{module}.{alias.name}" for alias in node.names)


# Note [Needed packages]
#
# Two questions are asked of a program. Which packages must a rank have, since without them no run can succeed? And
# which may it import? A run whose executors lack a package of the first kind is refused before ranks start; packages
# of the second kind are named in the error if the import fails.
#
# A package is needed if unpickling the program imports it: modules, functions and classes that the function and what
# it uses refer to, where these are pickled by value, as those of a notebook; and imports at the top level of the user's
# own modules, which travel by name. It is also needed if a script, or the function itself, imports it among its
# statements before any possible return. What stands in ``if`` and ``try`` may be optional; so may be what other
# functions import, since they may never be called.
