"""Whether a program is distributed already, told from its code before it runs. See Note [Already distributed]."""

from __future__ import annotations

import ast
import dis
import functools
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lagom.script import Script
from lagom.sources import codes, is_foreign, own_root, reached, used_modules

_STARTS = frozenset({"init_process_group", "init_device_mesh"})
"""What a program calls to have a process group of its own."""
_DRIVES = ("maggy.experiment",)
"""What a script imports to start ranks by itself."""
_PACKAGE = "horovod"
"""Whose programs do, too; also where it is another module that is imported by that name."""


def is_distributed(*values: Any) -> bool:
    """Whether the code of ``values``, or of what it uses and imports of the user's own, starts a process group."""
    modules: list[str] = []
    for value in reached(*values):
        if isinstance(value, (types.FunctionType, Script)):
            if not isinstance(value, Script) and is_foreign(value):
                if value.__name__ in _STARTS:
                    return True
                continue
            for part in codes(value.code if isinstance(value, Script) else value.__code__):
                if not _STARTS.isdisjoint(part.co_names):
                    return True
                modules += _imports(part)
            if isinstance(value, types.FunctionType) and any(map(_is_horovod, used_modules(value))):
                return True
        else:
            # A class of a module, or what is made of it: its methods are read with the module.
            modules.append((value if isinstance(value, type) else type(value)).__module__)
    return _any_starts(modules)


def is_driver(script: Script) -> bool:
    """Whether ``script``, or a module of the user's own that it imports, starts the ranks of a run by itself."""
    modules = [name for part in codes(script.code) for name in _imports(part)]
    found = {*modules, *(name for _, imports in _all_read(modules) for name in imports)}
    return not found.isdisjoint(_DRIVES)


def _any_starts(modules: list[str]) -> bool:
    if any(name.partition(".")[0] == _PACKAGE for name in modules):
        return True
    read = _all_read(modules)
    return any(starts or any(name.partition(".")[0] == _PACKAGE for name in imports) for starts, imports in read)


def _all_read(modules: Iterable[str]) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """What ``_read`` gives for the user's own files among ``modules``, and among what these import."""
    waiting, seen = list(modules), set[Path]()
    while waiting:
        for package, path in _files_of(waiting.pop()):
            if path in seen:
                continue
            seen.add(path)
            stat = path.stat()
            starts, imports = _read(path, package, stat.st_mtime_ns, stat.st_size)
            yield starts, imports
            waiting += imports


def _is_horovod(module: types.ModuleType) -> bool:
    return _PACKAGE in module.__name__.split(".")


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
def _read(path: Path, package: str, _mtime_ns: int, _size: int) -> tuple[bool, tuple[str, ...]]:
    """Whether the file starts a process group, and the dotted names that it may import."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # the rank will say so, should it come that far
        return False, ()
    starts, imports = False, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            starts = starts or node.id in _STARTS
        elif isinstance(node, ast.Attribute):
            starts = starts or node.attr in _STARTS
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            starts = starts or any(alias.name in _STARTS for alias in node.names)
            # "from . import x" in a.b.c is a.b.x.
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*parents, *([node.module] if node.module else [])])
            imports += [f"{home}.{alias.name}" for alias in node.names]
    return starts, tuple(imports)


# Note [Already distributed]
#
# A program that was written for torchrun reads RANK, LOCAL_RANK and WORLD_SIZE before it calls anything, and an
# ordinary one must not find them: libraries take them for orders (transformers' Trainer, for one, would make each
# rank train on a batch of its own). So it is the code that tells. A program is distributed when the script, a function
# of the user's own that it uses, or a module that these import or take a class from, names init_process_group or
# init_device_mesh, or imports Horovod; installed packages do not count. To name DistributedDataParallel or
# DistributedSampler is not enough: ordinary code names them to unwrap a model that might be wrapped. A program that
# leaves the call to an installed package finds no variables, and as a rule falls back to a single process, which lagom
# then distributes.
#
# All that this decides is the environment (see environment.py), on GPUs the devices that the rank can see, and whether
# a process that the program starts is one of its ranks. A program that names the call and does not come to it, because
# an option is off, stays an ordinary one: what ends lagom's part is the call itself, which is seen in either case. See
# Note [Joining] in patching/joined.py.
