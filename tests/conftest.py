"""Guards around every test: it starts from the same random numbers and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import logging
import os
import signal
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from tests import leaks, ranks
from tests.extension_settings import INSTALLED, SETTINGS
from tests.integration import clusters

pytest_plugins = ("tests.integration.spark_sessions", "tests.notebooks.notebook_fixtures")
# No garbage collection until all tests are imported, which takes a fifth longer with it.
gc.disable()
# A shell's background job has it ignored, and so would all processes that tests start, and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# An optimizer's first step would import Dynamo, and torch.compile all backends, in every rank forked from this process.
torch._dynamo.list_backends()
if not torch.cuda.is_available():
    # torch keeps each seed, with the stack, for a GPU that may come: that takes longer than a small test.
    for _module in (torch.cuda.random, torch.xpu.random):
        vars(_module)["_lazy_call"] = lambda *_, **__: None
# pytest adds its handlers to each logger that does not propagate, before each test; torch has sixty. What its trace is
# told is for no reader: ranks, which have the driver's loggers, would print it.
for _logger in [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch")]:
    _logger.propagate = _logger.name != "torch.__trace"
# Tests fork ranks from this process, and a pool of OpenMP threads, which a larger operation would start, does not
# survive a fork: the child waits for it forever.
torch.set_num_threads(1)
# Nor does a test leave a folder in the home of whoever runs it; those that want records say where.
os.environ["LAGOM_RUN_DIR"] = ""
# Spark takes the options of a driver's JVM, and of the JVM that builds its command line, from the environment only.
os.environ |= {"SPARK_SUBMIT_OPTS": clusters.JVM, "SPARK_LAUNCHER_OPTS": clusters.JVM}


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fails a test that leaves an environment variable, thread, process, process group, patch or handler."""
    leaks.seed_generators()
    before = leaks.state()
    yield
    if found := leaks.leaked(before):
        pytest.fail("the test leaked\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def warm_ranks() -> Iterator[None]:
    """Has the tests of a file use the same ranks one after another."""
    with ranks.warm_ranks():
        yield


@pytest.fixture(autouse=True)
def inherited_changes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Has the ranks of a test forked from this process if it changes something here, or is marked ``forked``."""
    marked = any(request.node.get_closest_marker(name) for name in ("forked", "filterwarnings"))
    forked = marked or {"monkeypatch", "capfd"} & set(request.fixturenames)
    with ranks.forked_ranks() if forked else contextlib.nullcontext():
        yield


@pytest.fixture
def rng_untouched() -> Iterator[None]:
    """Fails a test after which torch's, numpy's or random's generator stands elsewhere than before."""
    before = leaks.rng_state()
    yield
    assert leaks.rng_state() == before, "a generator of this process was drawn from or seeded"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is none, and of extensions that have been removed; put long files first.

    The order matters where several processes share the tests.
    """
    skip = pytest.mark.skip(reason="no GPU here")
    for item in items:
        if missing := sorted(_extensions_of(item) - INSTALLED):
            item.add_marker(pytest.mark.skip(reason=f"the extension {', '.join(missing)} has been removed"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
    if hasattr(config, "workerinput"):
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (_place(item.path), 0 if "integration" in item.path.parts else -sizes[item.path]))


def _extensions_of(item: pytest.Item) -> set[str]:
    """Return the extensions that a test names by ``needs``, or whose settings it gets as a parameter."""
    found = {name for marker in item.iter_markers("needs") for name in marker.args}
    params = dict(callspec.params) if (callspec := getattr(item, "callspec", None)) is not None else {}
    for values in (params, *(value for value in params.values() if isinstance(value, dict))):
        found |= {SETTINGS[name] for name, value in values.items() if name in SETTINGS and value not in (0, None)}
    return found


_LONG = (
    *(
        "integration",
        "csrc",
        "test_kills",
        "test_program_kills",
        "notebooks",
        "restart",
        "snapshots",
        "test_stalls",
        "sharing",
    ),
    *(
        "test_rehearsals",
        "test_resumption",
        "test_levels",
        "test_examples",
        "test_run",
        "test_mlflow",
        "test_mlflow_trials",
    ),
)
"""Folders and files whose few tests last long, the longest first; a file that begins last would keep one process busy
while the others have nothing to do."""


def _place(path: Path) -> int:
    return next((place for place, name in enumerate(_LONG) if name in (*path.parts, path.stem)), len(_LONG))


def pytest_collection_finish() -> None:
    """Exclude what was imported from garbage collection: in a forked rank a collection copies all of its pages."""
    # In ranks forked from a process with such functions lagom postpones no averages of gradients.
    compiled = vars(importlib.import_module("torch.jit._state"))["_python_cu"].get_functions()
    assert not compiled, "a test's file has compiled functions on import: have it import the module in a function"
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Have xdist give out the tests in the order in which they were collected; pass over an old PySpark's sockets."""
    config.option.loadscopereorder = False
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "channel") and hasattr(config, "workerinput"):  # xdist's, in a process that runs tests
            _keep_from_forks(plugin.channel.gateway._io)
    if find_spec("pyspark") and importlib.metadata.version("pyspark") < "4.2":
        # It leaves the socket of each collect() to Python, which says so.
        for kind in (
            "unclosed <socket:ResourceWarning",
            "Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning",
        ):
            config.addinivalue_line("filterwarnings", f"ignore:{kind}")


def _keep_from_forks(connection: Any) -> None:
    """Have forks of this process not hold its ``connection`` to xdist, which waits until the last holder has ended.

    After a process of tests that its time limit has ended, xdist would wait for each rank that was forked from it.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    files = connection.infile.fileno(), connection.outfile.fileno()
    os.register_at_fork(after_in_child=lambda: [os.dup2(nothing, fd, inheritable=False) for fd in files])


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Give all tests of a file, all on one kind of Spark and all in a notebook to one process.

    Those of tests/accelerator go to two: each process that runs them starts servers that load the test device.
    """

    def _split_scope(self, nodeid: str) -> str:
        path, _, name = nodeid.partition("::")
        if "/notebooks/" in path:
            return "notebooks"
        if "/accelerator/" in path and not path.endswith("/test_training.py"):
            return "accelerator"
        kinds = [kind for kind in clusters.KINDS if f"-{kind}-" in f"-{name.partition('[')[2][:-1]}-"]
        if "/integration/" not in path or not kinds:
            return path
        return f"Spark {max(kinds, key=len)}"

    def remove_node(self, node: Any) -> str | None:
        """Give the tests of a process that has ended to others, but for the one that ended it, which would end them."""
        units = list(self.assigned_work[node].values())
        crashed = next(((unit, name) for unit in units for name, is_done in unit.items() if not is_done), None)
        if crashed is None:
            super().remove_node(node)
            return None
        unit, name = crashed
        unit[name] = True
        super().remove_node(node)
        return str(name)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    """Start each kind of Spark once, and make the fixtures of a file once: see ``_ByFile``."""
    return _ByFile(config, log)
