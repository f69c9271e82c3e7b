"""``is_distributed``: decides from a program's code, before it runs, whether the program is distributed already.

See Note [Already distributed].
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lagom.program.script import Script
from lagom.program.sources import codes, imports_of, is_foreign, own_root, reachable_modules, used_modules

_STARTS = frozenset({"init_process_group", "init_device_mesh"})
"""Functions with which a program starts its own process group."""
_DRIVES = ("maggy.experiment",)
"""Modules with which a script starts its own ranks."""
_DEVICES = frozenset({"cuda", "gpu", "gpus", "accelerator"})
"""Words for accelerators: code that moves tensors to one contains at least one of them, or torch's name of the kind,
unless it gives a number only."""
_PACKAGE = "horovod"
"""Package whose programs count as distributed. Module names of lagom's stand-in for the package contain it, too."""


@dataclass(frozen=True)
class _Part:
    """One definition or renamed import in a module's text, or code that runs when the module is imported."""

    name: str | None
    """Name of the definition, or new name; None for code that runs with the import, and for decorated definitions."""
    starts: bool
    """Whether the code names a function of ``_STARTS``."""
    names: frozenset[str]
    """Names in the code, and strings that could be names."""
    imports: tuple[str, ...]
    """Dotted names that the code may import: modules, and attributes of modules, which may be modules too."""


def is_distributed(*values: Any) -> bool:
    """Return whether the code of ``values``, or user code that it uses, names one of ``_STARTS`` or imports Horovod."""
    return _found(*values)[0]


def needs_nccl(*values: Any) -> bool:
    """Return whether the code of ``values`` is distributed, and names NCCL, which needs GPUs, but never gloo."""
    starts, names = _found(*values)
    return starts and "nccl" in names and not any("gloo" in name for name in names)


def names_device(kind: str, *values: Any) -> bool:
    """Return whether the code of ``values`` names ``kind`` or has a word of ``_DEVICES``: it may move its tensors."""
    return not _found(*values)[1].isdisjoint({*_DEVICES, kind})


def _found(*values: Any) -> tuple[bool, set[str]]:
    """Return whether the code of ``values``, with user code that it uses, is distributed; and the names in this code.

    The names include strings that could be names, and the values of global strings.
    """
    starts, names, imports = False, set[str](), list[str]()
    for value in reachable_modules(*values):
        if issubclass(type(value), (types.FunctionType, Script)):
            if not issubclass(type(value), Script) and is_foreign(value):
                starts |= value.__name__ in _STARTS
                continue
            for part in codes(*(value.parts if issubclass(type(value), Script) else [value.__code__])):
                starts |= not _STARTS.isdisjoint(part.co_names)
                names.update(_names(part))
            imports += imports_of(value)
            if issubclass(type(value), types.FunctionType):
                starts |= any(map(_is_horovod, used_modules(value)))
                words = (value.__globals__.get(name) for name in value.__code__.co_names)
                names.update(word for word in words if type(word) is str)
    parts = _reached_parts(names, imports)
    imports += [name for part in parts for name in part.imports]
    starts |= any(part.starts for part in parts) or any(name.partition(".")[0] == _PACKAGE for name in imports)
    return starts, names.union(*(part.names for part in parts))


def is_driver(script: Script) -> bool:
    """Return whether ``script``, or a user module that it uses, imports a module of ``_DRIVES``."""
    parts = list(codes(*script.parts))
    imports = list(imports_of(script))
    used = _reached_parts({name for part in parts for name in _names(part)}, imports)
    return not {*imports, *(name for part in used for name in part.imports)}.isdisjoint(_DRIVES)


def _reached_parts(names: Iterable[str], imports: Iterable[str]) -> list[_Part]:
    """Return the used parts of the user's modules in ``imports``, and of the modules that these parts import.

    A part is used if it runs with the import, or if its name is in ``names`` or in another used part.
    """
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
            taken = set(map(id, found))  # ids, since comparing parts is slow and there may be many
            unused = [part for part in unused if id(part) not in taken]
            used += found
            known.update(name for part in found for name in part.names)
            waiting += [name for part in found for name in part.imports]
    return used


def _is_horovod(module: types.ModuleType) -> bool:
    return _PACKAGE in module.__name__.split(".")


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names through which ``code`` may call a function: names in it, and strings that could be names."""
    yield from code.co_names
    for constant in code.co_consts:
        for text in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(text, str) and (word := text.partition(":")[0]).isidentifier():  # so "cuda:0" is "cuda"
                yield word


def _files_of(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the user's own files that importing ``name`` runs, each with its package."""
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
    """Return the parts of a file in ``package``; the file's time and size are keys of the cache."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # the rank raises the error if it reaches the import
        return ()
    parts = []
    for name, node in _pieces(tree):
        parts.append(_part(name, node, package))
        if isinstance(node, ast.ImportFrom):
            parts += [_Part(new, old in _STARTS, frozenset({old}), ()) for old, new in _renamed(node)]
    return tuple(parts)


def _renamed(node: ast.ImportFrom) -> list[tuple[str, str]]:
    """Return the old and new name of each name that ``node`` renames."""
    return [(alias.name, alias.asname) for alias in node.names if alias.asname not in (None, alias.name)]


def _pieces(parent: ast.AST) -> Iterator[tuple[str | None, ast.AST]]:
    """Yield the definitions below ``parent`` with their names, and other code with None.

    Definitions inside of statements, such as conditions, are pieces of their own. The block of
    ``if __name__ == "__main__"`` is left out.
    """
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            # A decorator may register the definition under another name, so it counts as code that runs.
            yield (None if node.decorator_list else node.name), node
        elif isinstance(node, ast.If) and _asks_for_main(node.test):
            yield from _pieces(ast.Module(node.orelse, []))
        elif any(isinstance(child, (ast.stmt, ast.ExceptHandler)) for child in ast.iter_child_nodes(node)):
            yield from _pieces(node)
        else:
            yield None, node


def _asks_for_main(test: ast.expr) -> bool:
    """Return whether ``test`` is ``__name__ == "__main__"``, which is false in an imported module."""
    return ast.unparse(test).replace("'", '"') in ('__name__ == "__main__"', '"__main__" == __name__')


def _part(name: str | None, piece: ast.AST, package: str) -> _Part:
    written, strings, imports = set[str](), set[str](), list[str]()
    for node in ast.walk(piece):
        if isinstance(node, ast.Name):
            written.add(node.id)
        elif isinstance(node, ast.Attribute):
            written.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value.partition(":")[0]
            strings |= {word} if word.isidentifier() else set()
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node is not piece:  # ``_read`` makes a part of each name that a top-level import renames
                written.update(name for name, _ in _renamed(node))
            # Resolve relative imports: "from . import x" in a.b.c imports a.b.x.
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*parents, *([node.module] if node.module else [])])
            imports += [f"{home}.{alias.name}" for alias in node.names]
    return _Part(name, not _STARTS.isdisjoint(written), frozenset(written | strings), tuple(imports))


# Note [Already distributed]
#
# A program for torchrun reads RANK, LOCAL_RANK and WORLD_SIZE before it calls a function that lagom could patch. An
# ordinary program must not find these variables: libraries act on them (transformers' Trainer, for example, would make
# each rank train on different batches). So lagom must decide from the code. A program is distributed if the user code
# that it uses names init_process_group or init_device_mesh, or imports Horovod. Installed packages do not count. Loaded
# code is followed from object to object. Modules that are only imported when the program runs are read as text: their
# top-level code counts, and so does each definition whose name occurs in other code that counts, as a name or a string.
# So a program that uses a network from a module does not become distributed by a launcher for torchrun in the same
# module. Naming DistributedDataParallel or DistributedSampler is not enough: ordinary code names them to unwrap a model
# that might be wrapped. A program that leaves the call to an installed package finds no variables, and as a rule falls
# back to a single process, which lagom then distributes.
#
# A program that names NCCL, and never gloo, cannot make its process group without GPUs. Most such programs (nanoGPT,
# for example) are distributed only if RANK is set. So without GPUs such a program runs as an ordinary one.
#
# The answer decides the environment (see rank_environment.py), the GPUs that the rank can see, whether lagom's stand-in
# for Horovod can be imported, and whether a process that the program starts is one of its ranks. A distributed program
# runs without verify, lr_scaling and snapshots. After a loss it begins again only with as many ranks as
# before, unless min_world_size allows fewer. In all else a program that names the call but does not reach it, because
# an option is off, is still run as an ordinary program: the patches are turned off by the call itself. See Note
# [Joining] in distributed/init_process_group.py.
