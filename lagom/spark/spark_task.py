"""The function of a Spark task, which Spark's Python worker runs; pickled by value, since executors may lack lagom."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import io
import os
import pickle
import shutil
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lagom.program.user_folder import user_folder

SCHEMA = "rank int, name string, part int, data binary, report string"
SURVEY_SCHEMA = "task int, facts string"


def spark_task(code_zip: bytes, spec_pickle: bytes, payload: Any = None) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for ``mapInArrow`` that runs a task's ranks and yields their outcomes as rows of ``SCHEMA``.

    ``payload`` is Spark's broadcast of the payload; None if there is none.
    """

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            pass
        with _sources(code_zip):
            from lagom.spark.spark_worker import run_task

            rows = run_task(pickle.loads(spec_pickle), payload)
        yield from rows

    return run


def spark_survey(
    code_zip: bytes,
    driver: tuple[str, int] | None,
    barrier: bool,
    env: dict[str, str],
    packages: dict[str, str],
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for ``mapInArrow`` that yields facts about a task as rows of ``SURVEY_SCHEMA``.

    ``driver``, ``barrier``, ``env`` and ``packages`` are those of ``look_around`` in spark/executor_survey.py.
    """

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for _ in batches:
            pass
        with _sources(code_zip):
            from lagom.spark.executor_survey import look_around

            rows = list(look_around(driver, barrier, env, packages))
        yield from rows

    return run


@contextlib.contextmanager
def _sources(code_zip: bytes) -> Iterator[None]:
    """Context manager in which ``import lagom`` gives the driver's version. See Note [Worker reuse]."""
    root = _unpacked(code_zip)
    loaded = getattr(sys.modules.get("lagom"), "__file__", None) or ""
    if not loaded.startswith(root + os.sep):
        for name in [name for name in sys.modules if name.split(".")[0] == "lagom"]:
            del sys.modules[name]
    finder = _finder(root)
    sys.meta_path.insert(0, finder)
    sys.path.insert(0, root)
    try:
        yield
    finally:
        sys.path.remove(root)
        sys.meta_path.remove(finder)


def _finder(root: str) -> Any:
    """Return a finder that finds lagom in ``root``; it must come before the finder of an editable installation.

    The finder is an instance of a standard class: cloudpickle would pickle a class of lagom's by name, from a module
    that executors do not have.
    """

    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] != "lagom":
            return None
        return importlib.machinery.PathFinder.find_spec(name, [root] if path is None else path)

    return types.SimpleNamespace(find_spec=find_spec)


def _unpacked(code_zip: bytes) -> str:
    """Return the folder of the unpacked code; the host's first task that needs this version unpacks it."""
    base = user_folder()
    root = os.path.join(base, "code-" + hashlib.sha256(code_zip).hexdigest()[:16])
    if not os.path.isdir(root):
        part = tempfile.mkdtemp(dir=base)
        zipfile.ZipFile(io.BytesIO(code_zip)).extractall(part)
        try:
            os.rename(part, root)
        except OSError:  # another task was faster
            shutil.rmtree(part)
    os.utime(root)  # marks it as used; see remove_leftovers() in host/workspace.py
    return root


# Note [Worker reuse]
#
# Spark reuses its Python workers for the next job, with all modules that they have imported. So the worker imports the
# driver's lagom from a folder named by a hash of its content, and imports it anew if the next job brings another
# version. The worker does not import torch, which the executor's fork server imports
# (lagom/spark/executor_server.py), nor the user's modules. Processes that are forked for the run import those, so
# that the next run sees edited modules.
