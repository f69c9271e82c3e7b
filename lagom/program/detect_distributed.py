"""Whether a program is distributed already, told from its code before it runs. See Note [Already distributed]."""

from __future__ import annotations

import ast
import dis
import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagom.program.script import Script
from lagom.program.sources import codes, is_foreign, own_root, reachable_modules, used_modules

_STARTS = frozenset({"init_process_group", "init_device_mesh"})
"""What a program calls to have a process group of its own."""
_DRIVES = ("maggy.experiment",)
"""What a script imports to start ranks by itself."""
_PACKAGE = "horovod"
"""Whose programs do, too; also where it is another module that is imported by that name."""


@dataclass(frozen=True)
class _Part:
    """Of a module's text: what runs when it is imported, or one definition."""

    name: str | None
    """Of the definition; None: it runs with the import."""
    starts: bool
    """Whether it starts a process group."""
    names: frozenset[str]
    """That it writes, in code or as a whole string."""
    imports: tuple[str, ...]
    """Dotted names of what it may import: modules, and what it takes from them, which may be modules."""


def is_distributed(*values: Any) -> bool:
    """Whether the code of ``values``, or of what it uses of the user's own, starts a process group."""
    return _found(*values)[0]


def needs_nccl(*values: Any) -> bool:
    """Whether that code starts one, and names NCCL as its backend, which needs GPUs, and never gloo."""
    starts, names = _found(*values)
    return starts and "nccl" in names and not any("gloo" in name for name in names)


def _found(*values: Any) -> tuple[bool, set[str]]:
    """Whether code starts a process group, and the names and words that it writes."""
    starts, names, imports = False, set[str](), list[str]()
    for value in reachable_modules(*values):
        if isinstance(value, (types.FunctionType, Script)):
            if not isinstance(value, Script) and is_foreign(value):
                starts |= value.__name__ in _STARTS
                continue
            for part in codes(*(value.parts if isinstance(value, Script) else [value.__code__])):
                starts |= not _STARTS.isdisjoint(part.co_names)
                names.update(_names(part))
                imports += _imports(part)
            if isinstance(value, types.FunctionType):
                starts |= any(map(_is_horovod, used_modules(value)))
                words = (value.__globals__.get(name) for name in value.__code__.co_names)
                names.update(word for word in words if type(word) is str)
    parts = _reached_parts(names, imports)
    imports += [name for part in parts for name in part.imports]
    starts |= any(part.starts for part in parts) or any(name.partition(".")[0] == _PACKAGE for name in imports)
    return starts, names.union(*(part.names for part in parts))


def is_driver(script: Script) -> bool:
    """Whether ``script``, or what it uses of modules of the user's own, starts the ranks of a run by itself."""
    parts = list(codes(*script.parts))
    imports = [name for part in parts for name in _imports(part)]
    used = _reached_parts({name for part in parts for name in _names(part)}, imports)
    return not {*imports, *(name for part in used for name in part.imports)}.isdisjoint(_DRIVES)


def _reached_parts(names: Iterable[str], imports: Iterable[str]) -> list[_Part]:
    """Of the user's own modules among ``imports``, and those that these import: what is used under one of ``names``."""
    known, waiting = set(names), list(imports)
    seen, unused, used = set[Path](), list[_Part](), list[_Part]()
    while waiting:
        for package, path in [file for name in waiting for file in _files_of(name)]:
            if path not in seen:
                seen.add(path)
                stat = path.stat()
                unused += _read(path, package, stat.st_mtime_ns, stat.st_size)
        waiting = []
        while found := [part for part in unused if part.name is None or part.name in known]:
            taken = set(map(id, found))  # as parts compare slowly, and a folder of packages has many
            unused = [part for part in unused if id(part) not in taken]
            used += found
            known.update(name for part in found for name in part.names)
            waiting += [name for part in found for name in part.imports]
    return used


def _is_horovod(module: types.ModuleType) -> bool:
    return _PACKAGE in module.__name__.split(".")


def _names(code: types.CodeType) -> Iterator[str]:
    """What ``code`` may call something by: names, and strings that could be one."""
    yield from code.co_names
    for constant in code.co_consts:
        for text in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(text, str) and text.isidentifier():
                yield text


def _imports(code: types.CodeType) -> Iterator[str]:
    """Dotted names that ``code`` may import: of modules, and of what it takes from them, which may be modules."""
    module = ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            module = step.argval
            yield module
        elif step.opname == "IMPORT_FROM":
            yield f"{module}.{step.argval}"


def _files_of(name: str) -> Iterator[tuple[str, Path]]:
    """The user's own files that importing ``name`` runs, each with the package that it lies in."""
    top, *rest = name.split(".")
    root = own_root(top)
    if root is None:
        return
    if root.is_file():
        yield "", root
        return
    package, folder = top, root
    while True:
        if (folder / "__init__.py").is_file():
            yield package, folder / "__init__.py"
        if not rest:
            return
        part = rest.pop(0)
        if (folder / f"{part}.py").is_file():
            yield package, folder / f"{part}.py"
        if not (folder / part).is_dir():
            return
        package, folder = f"{package}.{part}", folder / part


@functools.lru_cache(maxsize=4096)
def _read(path: Path, package: str, _mtime_ns: int, _size: int) -> tuple[_Part, ...]:
    """The parts of a file that lies in ``package``."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # the rank will say so, should it come that far
        return ()
    parts = []
    for name, node in _pieces(tree):
        parts.append(_part(name, node, package))
        if isinstance(node, ast.ImportFrom):
            parts += [_Part(new, old in _STARTS, frozenset({old}), ()) for old, new in _renamed(node)]
    return tuple(parts)


def _renamed(node: ast.ImportFrom) -> list[tuple[str, str]]:
    """What it takes under another name, and that name."""
    return [(alias.name, alias.asname) for alias in node.names if alias.asname not in (None, alias.name)]


def _pieces(parent: ast.AST) -> Iterator[tuple[str | None, ast.AST]]:
    """Definitions below ``parent``, which may lie in conditions, with their names; and all else, with None."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            # What a decorator does with it is not known: it may be called by another name.
            yield (None if node.decorator_list else node.name), node
        elif isinstance(node, ast.If) and _asks_for_main(node.test):
            yield from _pieces(ast.Module(node.orelse, []))
        elif any(isinstance(child, (ast.stmt, ast.ExceptHandler)) for child in ast.iter_child_nodes(node)):
            yield from _pieces(node)
        else:
            yield None, node


def _asks_for_main(test: ast.expr) -> bool:
    """Whether it is ``__name__ == "__main__"``, which does not hold in what is imported."""
    return ast.unparse(test).replace("'", '"') in ('__name__ == "__main__"', '"__main__" == __name__')


def _part(name: str | None, piece: ast.AST, package: str) -> _Part:
    written, strings, imports = set[str](), set[str](), list[str]()
    for node in ast.walk(piece):
        if isinstance(node, ast.Name):
            written.add(node.id)
        elif isinstance(node, ast.Attribute):
            written.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            strings.add(node.value)
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node is not piece:  # who uses it writes its name
                written.update(name for name, _ in _renamed(node))
            # "from . import x" in a.b.c is a.b.x.
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*parents, *([node.module] if node.module else [])])
            imports += [f"{home}.{alias.name}" for alias in node.names]
    return _Part(name, not _STARTS.isdisjoint(written), frozenset(written | strings), tuple(imports))


# Note [Already distributed]
#
# A program that was written for torchrun reads RANK, LOCAL_RANK and WORLD_SIZE before it calls anything, and an
# ordinary one must not find them: libraries take them for orders (transformers' Trainer, for one, would make each
# rank train on a batch of its own). So it is the code that tells. A program is distributed when what it uses of the
# user's own names init_process_group or init_device_mesh, or imports Horovod; installed packages do not count. What is
# loaded is followed object by object. What is only imported when it runs is read as text: what such a module does when
# it is imported counts, and of its definitions those whose name, as code or as a string, is written in code that
# counts; so the launcher for torchrun that lies beside a network makes no program distributed that uses the network.
# To name DistributedDataParallel or DistributedSampler is not enough: ordinary code names them to unwrap a model that
# might be wrapped. A program that leaves the call to an installed package finds no variables, and as a rule falls back
# to a single process, which lagom then distributes.
#
# A program that names NCCL, and never gloo, cannot have its process group where there are no GPUs. Most of these are
# distributed only where RANK is set (nanoGPT, for one), so there it is not: such a program runs as an ordinary one.
#
# All that this decides is the environment (see environment.py), on GPUs the devices that the rank can see, and whether
# a process that the program starts is one of its ranks. A program that names the call and does not come to it, because
# an option is off, stays an ordinary one: what ends lagom's part is the call itself, which is seen in either case. See
# Note [Joining] in distributed/init_process_group.py.
