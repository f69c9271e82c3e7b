"""``is_distributed``: tell from a program's code, before it runs, whether it is distributed already.

See Note [Already distributed].
"""

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
"""Functions by which a program starts a process group of its own."""
_DRIVES = ("maggy.experiment",)
"""Modules by which a script starts ranks by itself."""
_GPU = frozenset({"cuda", "gpu", "gpus", "accelerator"})
"""Words without which code does not get tensors onto a GPU."""
_PACKAGE = "horovod"
"""Package whose programs start ranks by themselves too; also if another module is imported by its name."""


@dataclass(frozen=True)
class _Part:
    """One definition in a module's text, or code that runs when the module is imported."""

    name: str | None
    """Name of the definition; None for code that runs with the import."""
    starts: bool
    """True if it starts a process group."""
    names: frozenset[str]
    """Names in its code, and whole strings that could be names."""
    imports: tuple[str, ...]
    """Dotted names that it may import: modules, and their attributes, which may be modules."""


def is_distributed(*values: Any) -> bool:
    """Return whether the code of ``values``, or user code that it uses, starts a process group."""
    return _found(*values)[0]


def needs_nccl(*values: Any) -> bool:
    """Return whether that code starts a process group on NCCL, which needs GPUs, and never names gloo."""
    starts, names = _found(*values)
    return starts and "nccl" in names and not any("gloo" in name for name in names)


def names_gpu(*values: Any) -> bool:
    """Return whether that code names a GPU, and so places its tensors itself."""
    return not _found(*values)[1].isdisjoint(_GPU)


def _found(*values: Any) -> tuple[bool, set[str]]:
    """Return whether code starts a process group, and the names and words in it."""
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
    """Return whether ``script``, or user modules that it uses, starts the ranks of a run by itself."""
    parts = list(codes(*script.parts))
    imports = [name for part in parts for name in _imports(part)]
    used = _reached_parts({name for part in parts for name in _names(part)}, imports)
    return not {*imports, *(name for part in used for name in part.imports)}.isdisjoint(_DRIVES)


def _reached_parts(names: Iterable[str], imports: Iterable[str]) -> list[_Part]:
    """Return the parts that ``names`` reach of the user's modules in ``imports``, and of modules that these import."""
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
            taken = set(map(id, found))  # parts compare slowly, and a folder of packages has many
            unused = [part for part in unused if id(part) not in taken]
            used += found
            known.update(name for part in found for name in part.names)
            waiting += [name for part in found for name in part.imports]
    return used


def _is_horovod(module: types.ModuleType) -> bool:
    return _PACKAGE in module.__name__.split(".")


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names by which ``code`` may call something: names, and strings that could be one."""
    yield from code.co_names
    for constant in code.co_consts:
        for text in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(text, str) and (word := text.partition(":")[0]).isidentifier():  # so "cuda:0" is "cuda"
                yield word


def _imports(code: types.CodeType) -> Iterator[str]:
    """Yield dotted names that ``code`` may import: modules, and their attributes, which may be modules."""
    module = ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            module = step.argval
            yield module
        elif step.opname == "IMPORT_FROM":
            yield f"{module}.{step.argval}"


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
    """Return the parts of a file in ``package``."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # the rank raises it, if the import is reached
        return ()
    parts = []
    for name, node in _pieces(tree):
        parts.append(_part(name, node, package))
        if isinstance(node, ast.ImportFrom):
            parts += [_Part(new, old in _STARTS, frozenset({old}), ()) for old, new in _renamed(node)]
    return tuple(parts)


def _renamed(node: ast.ImportFrom) -> list[tuple[str, str]]:
    """Return the old and new names of renamed imports."""
    return [(alias.name, alias.asname) for alias in node.names if alias.asname not in (None, alias.name)]


def _pieces(parent: ast.AST) -> Iterator[tuple[str | None, ast.AST]]:
    """Yield the definitions below ``parent``, also in conditions, with their names; and all other code, with None."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            # A decorator may register it to be called by another name.
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
            if node is not piece:  # code that uses the import has its name
                written.update(name for name, _ in _renamed(node))
            # "from . import x" in a.b.c is a.b.x.
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*parents, *([node.module] if node.module else [])])
            imports += [f"{home}.{alias.name}" for alias in node.names]
    return _Part(name, not _STARTS.isdisjoint(written), frozenset(written | strings), tuple(imports))


# Note [Already distributed]
#
# A program for torchrun reads RANK, LOCAL_RANK and WORLD_SIZE before it calls anything, and an ordinary program must
# not find them: libraries follow them (transformers' Trainer, for one, would make each rank train on a batch of its
# own). So the code decides. A program is distributed if the user code that it uses names init_process_group or
# init_device_mesh, or imports Horovod; installed packages do not count. Loaded code is followed object by object.
# Modules that are only imported when the program runs are read as text: their top-level code counts, and those of their
# definitions whose name, as code or as a string, occurs in code that counts. So a launcher for torchrun beside a
# network does not make a program distributed that uses the network. Naming DistributedDataParallel or
# DistributedSampler is not enough: ordinary code names them to unwrap a model that might be wrapped. A program that
# leaves the call to an installed package finds no variables, and as a rule falls back to a single process, which lagom
# then distributes.
#
# A program that names NCCL, and never gloo, cannot have its process group without GPUs. Most of these are distributed
# only if RANK is set (nanoGPT, for one), so without GPUs such a program runs as an ordinary one.
#
# The answer decides only the environment (see rank_environment.py), on GPUs the devices that the rank can see, and
# whether a process that the program starts is one of its ranks. A program that names the call and does not reach it,
# because an option is off, stays an ordinary one: lagom's part ends at the call itself, which is seen in either case.
# See Note [Joining] in distributed/init_process_group.py.
