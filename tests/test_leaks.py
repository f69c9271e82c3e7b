"""The guards of ``conftest.py`` see what they are there to see."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests import leaks


def _leaks_of(act: Callable[[], object], undo: Callable[[], object]) -> list[str]:
    before = leaks.state()
    act()
    try:
        return leaks.leaked(before, patience_s=0.1)
    finally:
        undo()


def test_nothing_is_reported_when_nothing_happened() -> None:
    assert leaks.leaked(leaks.state()) == []


def test_environment_variable_is_reported() -> None:
    found = _leaks_of(lambda: os.environ.update(LAGOM_LEAK="1"), lambda: os.environ.pop("LAGOM_LEAK"))
    assert found == ["environment variable: LAGOM_LEAK is left"]


def test_working_directory_is_reported(tmp_path: Path) -> None:
    here = Path.cwd()
    assert _leaks_of(lambda: os.chdir(tmp_path), lambda: os.chdir(here)) == ["process: working directory is changed"]


def test_signal_handler_is_reported() -> None:
    old = signal.getsignal(signal.SIGTERM)
    found = _leaks_of(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), lambda: signal.signal(signal.SIGTERM, old))
    assert found == ["signal handler: SIGTERM is changed"]


def test_thread_is_reported_and_one_that_ends_is_not() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="leaky")
    before = leaks.state()
    found = _leaks_of(thread.start, stop.set)
    assert len(found) == 1
    assert found[0].startswith("thread: leaky")
    assert leaks.leaked(before) == []


def test_child_process_is_reported() -> None:
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    child = context.Process(target=stop.wait)
    found = _leaks_of(child.start, stop.set)
    child.join()
    assert len(found) == 1
    assert found[0].startswith(f"child process: {child.pid} ")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(torch.utils.data.DataLoader, "__iter__"), (torch.nn.Module, "__call__"), (torch.Tensor, "backward")],
)
def test_patched_attribute_is_reported(owner: type, name: str) -> None:
    original = vars(owner)[name]
    found = _leaks_of(lambda: setattr(owner, name, lambda *_: None), lambda: setattr(owner, name, original))
    assert len(found) == 1
    assert found[0].endswith(f"{owner.__name__}.{name} is changed")


def test_new_attribute_where_one_was_inherited_is_reported() -> None:
    owner = torch.nn.Parameter
    assert "backward" not in vars(owner)
    found = _leaks_of(lambda: setattr(owner, "backward", torch.Tensor.backward), lambda: delattr(owner, "backward"))
    assert len(found) == 1
    assert found[0].endswith("Parameter.backward is left")


def test_drawing_a_random_number_changes_the_state_that_is_compared() -> None:
    before = leaks.rng_state()
    torch.rand(1)
    assert leaks.rng_state() != before


def test_a_fork_does_not_keep_the_connection_to_xdist(pytestconfig: pytest.Config) -> None:
    ios = [
        plugin.channel.gateway._io for plugin in pytestconfig.pluginmanager.get_plugins() if hasattr(plugin, "channel")
    ]
    if not ios:
        pytest.skip("these tests run in one process, without xdist")
    paths = [f"/proc/self/fd/{file.fileno()}" for file in (ios[0].infile, ios[0].outfile)]
    assert all(os.readlink(path).startswith("pipe:") for path in paths)
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: theirs.send([os.readlink(path) for path in paths])
    )
    child.start()
    assert ours.recv() == ["/dev/null", "/dev/null"]
    child.join()
    child.close()
    ours.close()
    theirs.close()


def test_a_test_that_ended_its_process_is_not_given_to_another(pytestconfig: pytest.Config) -> None:
    path = str(Path(__file__).with_name("conftest.py"))
    (conftest,) = [one for one in pytestconfig.pluginmanager.get_plugins() if getattr(one, "__file__", None) == path]
    scheduling, node = object.__new__(conftest._ByFile), object()
    scheduling.workqueue = {}
    scheduling.assigned_work = {node: {"a.py": {"a.py::one": True, "a.py::two": False, "a.py::three": False}}}
    assert scheduling.remove_node(node) == "a.py::two"
    assert scheduling.workqueue == {"a.py": {"a.py::one": True, "a.py::two": True, "a.py::three": False}}
