"""Ships this package to new processes that may have no lagom: Spark's Python workers, petastorm's pools."""

from __future__ import annotations

import atexit
import functools
import os
import pkgutil
import shutil
import sys
import tempfile
import weakref
import zipfile
from typing import Any

from .finder import SHIM, missing

_FILES = ("__init__", "finder", "legacy", "mending", "names", "travel")
_NAME = "_lagom_petastorm"
_STAND_IN = f'''"""Stands before petastorm on sys.path; imports the real one as lagom does."""

import importlib
import sys

importlib.import_module("{_NAME}")
del sys.modules["petastorm"]
importlib.import_module("petastorm")
'''
_LOOK = "(__import__('sys').executable, __import__('importlib.util').util.find_spec('petastorm') is not None)"
"""Python of a worker, and whether it has petastorm, as an expression."""
_shipped: weakref.WeakSet[Any] = weakref.WeakSet()


def ship(context: Any) -> None:
    """Let the Python workers of a SparkContext import petastorm as this process does.

    Raises:
        ModuleNotFoundError: if a worker has no petastorm; otherwise each of its tasks would fail with a long traceback.
    """
    if context not in _shipped:
        _check_worker(context)
        before = list(sys.path)
        context.addPyFile(archive())
        sys.path[:] = before  # the archive is for the workers alone; this process has petastorm itself
        _shipped.add(context)


def _check_worker(context: Any) -> None:
    try:
        # A function of Python's own, since a worker may not be able to import this module.
        ((python, found),) = context.parallelize([_LOOK], 1).map(eval).collect()
    except Exception:  # the program's own job will say what is wrong with the cluster
        return
    if not found:
        raise ModuleNotFoundError(missing(python), name="petastorm")


@functools.cache
def archive() -> str:
    """Return the path of an archive that makes ``import petastorm`` work from ``sys.path``.

    Make the archive unless it is on ``sys.path`` already, and delete it when this process ends.
    """
    for entry in sys.path:
        if os.path.basename(entry) == SHIM and os.path.exists(entry):
            return entry
    folder = tempfile.mkdtemp(prefix="lagom-petastorm-")
    atexit.register(_remove, folder, os.getpid())
    path = os.path.join(folder, SHIM)
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("petastorm/__init__.py", _STAND_IN)
        for name in _FILES:
            source = pkgutil.get_data(__package__ or _NAME, f"{name}.py")
            assert source is not None
            made.writestr(f"{_NAME}/{name}.py", source)
    return path


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # a forked process inherits this exit handler, and must not remove the folder
        shutil.rmtree(folder, ignore_errors=True)
