"""The source files that are sent with a run: lagom itself, and the user's own modules."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib.util
import io
import linecache
import sys
import sysconfig
import types
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lagom.inspection.reads import bases, class_attributes, module_of, referents
from lagom.program.script import Script

_MAX_FILE = 1 << 20  # bytes; larger files in a package count as data, and data is not sent with the sources
_SKIPPED = {"__pycache__", "node_modules"}


@functools.cache
def lagom_zip() -> bytes:
    """Zip lagom and the cloudpickle that wrote the payload, for executors that have neither."""
    import cloudpickle

    compiled = importlib.util.find_spec("lagom._native")
    # In an editable installation the extension is not beside the sources.
    beside = {} if compiled is None or not compiled.origin else {f"lagom/{Path(compiled.origin).name}": compiled.origin}
    return _zip([Path(__file__).parents[1], Path(cloudpickle.__file__).parent], beside)


def modules_zip(function: Callable[..., Any]) -> bytes:
    """Return a zip of the user's modules that are loaded or that ``function`` would import; b"" without any.

    A package is sent whole, but for hidden files and those larger than ``_MAX_FILE``. The zip has the files on disk,
    even if they were edited after the import.
    """
    roots = {root for module in list(sys.modules) if (root := own_root(module.partition(".")[0]))}
    waiting = [name.partition(".")[0] for name in _imports_of(function)]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if root := own_root(name):
            roots.add(root)
            waiting += [found.partition(".")[0] for found in _imports_in(root)]
    return _zip(sorted(roots)) if roots else b""


def own_root(name: str) -> Path | None:
    """Return the file or folder of the user's top-level module ``name``; None if it is another's, or not found.

    Modules of Python, lagom and installed packages are another's; a module without Python source is not found.
    """
    if (
        name in sys.builtin_module_names
        or name in sys.stdlib_module_names
        or name in ("lagom", "__main__", "__mp_main__")
    ):
        return None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [])
    path = Path(places[0] if places else spec.origin or "")
    if not path.exists() or (not places and path.suffix != ".py") or is_installed(str(path)):
        return None
    return path


def is_installed(path: str) -> bool:
    """Return whether ``path`` belongs to Python or to an installed package, rather than to the user."""
    parts = Path(path).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return any(path.startswith(place) for place in _python_places())


@functools.cache
def _python_places() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(
        {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")} | {sys.base_prefix + "/lib/python"}
    )


def _imports_of(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of the modules that ``function``, and the functions that it uses, import when they run."""
    for value in reachable_modules(function):
        if issubclass(type(value), (types.FunctionType, Script)):
            yield from imports_of(value)
        if issubclass(type(value), Script) and value.module:
            yield value.module


def reachable_modules(*values: Any) -> Iterator[Any]:
    """Yield ``values`` and the objects that their code uses, at any depth.

    These are globals and closure variables of functions, and attributes and bases of the user's own classes. For a
    module among them, the attributes that the code names are yielded instead. Attributes of instances are not followed,
    nor is the code of Python, lagom and installed packages.
    """
    waiting: list[Any] = list(values)
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        kind = type(value)  # isinstance() would ask the object, too
        if issubclass(kind, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif issubclass(kind, types.MethodType):
            waiting += [value.__func__, value.__self__]
        elif issubclass(kind, types.FunctionType):
            if not is_foreign(value):
                names = {name for code in codes(value.__code__) for name in code.co_names}
                known = [value.__globals__[name] for name in names if name in value.__globals__]
                waiting += _opened([*known, *_contents(value.__closure__ or ())], names)
        elif issubclass(kind, (staticmethod, classmethod, property)):
            waiting += referents(value)
        elif issubclass(kind, type):
            waiting += [*class_attributes(value).values(), *bases(value)[1:]] if is_own(value) else []
        elif is_own(kind):
            waiting.append(kind)


def used_modules(function: types.FunctionType) -> Iterator[types.ModuleType]:
    """Yield the modules in those globals and closure variables that ``function`` uses."""
    names = {name for code in codes(function.__code__) for name in code.co_names}
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    for value in (*known, *_contents(function.__closure__ or ())):
        if issubclass(type(value), types.ModuleType):
            yield value


def source_files(*values: Any) -> dict[str, str]:
    """Return the texts of the files of the user's own functions that ``values`` use, by ``co_filename`` of their code.

    Scripts are included, and the user's own modules that these functions import when they run, by their paths.
    """
    texts: dict[str, str] = {}
    for value in reachable_modules(*values):
        if issubclass(type(value), Script):
            texts |= dict(value.texts())
        if issubclass(type(value), types.FunctionType) and not is_foreign(value):
            for path in filter(None, map(_own_file, imports_of(value))):
                if (text := source_text(path)) is not None:
                    texts[str(path)] = text
            name = value.__code__.co_filename
            if name not in texts and (lines := linecache.getlines(name, value.__globals__)):
                texts[name] = "".join(lines)
    return texts


def source_text(path: Path) -> str | None:
    """Return the text of a source file, decoded as Python decodes it; None if Python could not decode it."""
    try:
        return importlib.util.decode_source(path.read_bytes())
    except (SyntaxError, UnicodeDecodeError):
        return None


def _own_file(module: str) -> Path | None:
    """Return the file of the user's own ``module``, without importing it; None if it is not the user's or not found."""
    root = own_root(module.partition(".")[0])
    if root is None:
        return None
    path = root.parent / module.replace(".", "/")
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)


def _opened(values: Iterable[Any], names: set[str]) -> Iterator[Any]:
    """Yield ``values``, with each module that is not installed replaced by those of its attributes in ``names``.

    Installed modules are left out.
    """
    todo, seen = list(values), set[int]()
    while todo:
        value = todo.pop()
        if not issubclass(type(value), types.ModuleType):
            yield value
        elif id(value) not in seen and not is_installed(getattr(value, "__file__", None) or ""):
            seen.add(id(value))
            todo += [vars(value)[name] for name in names if name in vars(value)]


def is_foreign(function: types.FunctionType) -> bool:
    """Return whether ``function`` is lagom's, Python's or an installed package's, not the user's own."""
    return (function.__module__ or "").partition(".")[0] == "lagom" or is_installed(function.__code__.co_filename)


def is_own(cls: type) -> bool:
    """Return whether the user wrote ``cls``."""
    name = module_of(cls)
    if name == "__main__":
        return True
    path = getattr(sys.modules.get(name), "__file__", None) if type(name) is str else None
    return path is not None and name.partition(".")[0] != "lagom" and not is_installed(path)


def codes(*parts: types.CodeType) -> Iterator[types.CodeType]:
    """Yield ``parts``, and the code of all functions and classes defined in them, at any depth."""
    for code in parts:
        yield code
        yield from codes(*(constant for constant in code.co_consts if isinstance(constant, types.CodeType)))


def imports_of(value: types.FunctionType | Script) -> Iterator[str]:
    """Yield the modules, and the names from modules, that ``value`` and the code defined in it import."""
    if isinstance(value, Script):
        return imports_of_codes(*value.parts, package=value.package)
    return imports_of_codes(value.__code__, package=value.__globals__.get("__package__") or "")


def imports_of_codes(*parts: types.CodeType, package: str = "") -> Iterator[str]:
    """Yield the modules, and the names from modules, that ``parts`` and the code defined in them import.

    Args:
        package: package to which relative imports refer; without one they are left out.
    """
    yield from (name for code in codes(*parts) for name in _imports_of_code(code, package))


def _imports_of_code(code: types.CodeType, package: str) -> Iterator[str]:
    """Yield the modules that ``code`` imports, and the names that it imports from them, which may be modules too."""
    module = ""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for place, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level = steps[place - 2].argval  # the number of leading dots, loaded before the names and the module
            try:
                module = importlib.util.resolve_name("." * level + step.argval, package)
            except ImportError:  # the rank raises the error if it reaches the import
                module = ""
            if module:
                yield module
        elif step.opname == "IMPORT_FROM" and module:
            yield f"{module}.{step.argval}"


def _contents(cells: Iterable[types.CellType]) -> Iterator[Any]:
    for cell in cells:
        with contextlib.suppress(ValueError):  # the cell has no value yet
            yield cell.cell_contents


def _imports_in(root: Path) -> Iterator[str]:
    for path in _files(root):
        if path.suffix != ".py":
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # the rank raises the error, with its line, if it reaches the import
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                yield node.module


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
        return
    for path in sorted(root.rglob("*")):
        hidden = any(part in _SKIPPED or part.startswith(".") for part in path.relative_to(root).parts)
        if not hidden and path.is_file() and path.stat().st_size <= _MAX_FILE:
            yield path


def _zip(roots: Iterable[Path], others: Mapping[str, str] = MappingProxyType({})) -> bytes:
    stream = io.BytesIO()
    files = {str(path.relative_to(root.parent)): path for root in roots for path in _files(root)}
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in (files | {name: Path(path) for name, path in others.items()}).items():
            # With a fixed date, equal content gives an equal archive, and so the same folder on the executors.
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=1)
    return stream.getvalue()
