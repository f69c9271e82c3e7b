"""Processes with the test device: forked from a server of their own, and not from the process of the tests.

A process that has loaded the device keeps it, and every later test there would find an accelerator. And torch starts
the threads of a device's backward at the first backward of a process and of its forks, so that a fork of a process of
tests, which has run backwards without a device, has none.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, ParamSpec

import pytest

from tests import leaks
from tests.accelerator.device_build import ROOT, can_build, folder, library
from tests.rank_processes import TIMEOUT_S, RankFailedError, on_new_ranks

Parameters = ParamSpec("Parameters")
needs_device = pytest.mark.skipif(
    not can_build() and os.environ.get("LAGOM_TEST_NEEDS_DEVICE") != "1",
    reason="the path on GPUs is not tested: there is no C++ compiler (CXX, or c++) to build the test device with",
)
"""Skips without a compiler; CI sets the variable, with which such tests fail."""
RankFunction = Callable[[int, Any], Any]


def with_driver(num_devices: int) -> Callable[[Callable[Parameters, None]], Callable[Parameters, None]]:
    """Have a test that starts runs of lagom run in a process in which the test device is installed, as ``with_device``.

    The process stays for further tests with so many devices, as does the server from which lagom forks its ranks. A
    test may run backwards in it on the CPU, but not use the device.
    """

    def decorate(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
        @functools.wraps(function)
        def test(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            body: Any = _Test(function.__module__, function.__name__)
            _run(None, functools.partial(_run_test, body, args, kwargs), num_devices)

        return test

    return decorate


def with_device(num_devices: int = 2) -> Callable[[Callable[Parameters, None]], Callable[Parameters, None]]:
    """Have a test run in a process of its own in which the test device is installed, as a vendor's package is.

    Every Python that the process starts, such as lagom's ranks, finds the device when it imports torch. The test's
    arguments are pickled.
    """

    def decorate(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
        @functools.wraps(function)
        def test(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
            body: Any = _Test(function.__module__, function.__name__)
            _run(
                1,
                functools.partial(_run_test, body, args, kwargs),
                num_devices,
            )

        return test

    return decorate


class _Test(NamedTuple):
    """A decorated test, by its name."""

    module: str
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _test, (self.module, self.name)


def _test(module: str, name: str) -> Callable[..., None]:
    """Return the test itself, in the server, whose forks then have the modules that it imports."""
    found: Callable[..., None] = getattr(import_module(module), name).__wrapped__
    return found


def _run_test(test: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any], _: int) -> None:
    if str(folder()) not in sys.path:
        sys.path.insert(0, str(folder()))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder()), str(ROOT)])
    test(*args, **kwargs)


def on_devices(world_size: int, function: RankFunction, num_devices: int | None = None) -> list[Any]:
    """Run ``function(rank, store)`` on ranks with a device each; return the results in rank order.

    Args:
        function: a function that can be pickled; ``store`` is one of torch.distributed.
        num_devices: devices of the machine, if ranks are to share some.
    """
    with TemporaryDirectory() as scratch:
        job = functools.partial(_run_rank, function, scratch, num_devices or world_size)
        return _run(world_size, job, num_devices or world_size)


def _run_rank(function: RankFunction, scratch: str, num_devices: int, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    torch.get_device_module("lagomtest").set_device(rank % num_devices)
    store = dist.FileStore(str(Path(scratch, "store")), -1)
    store.set_timeout(timedelta(seconds=60))
    return function(rank, store)


class _Server:
    """A process that has loaded the device, and not used it; its forks run the jobs."""

    def __init__(self) -> None:
        library()  # built before any time limit of a job
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.accelerator.device_processes", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=dict(os.environ) | {"PYTHONPATH": path, "LAGOM_TEST_DEVICE": "lagomtest"},
            )
        self._connection = Connection(ours.detach())
        self.pid = os.getpid()
        leaks.STAYING.add(self._process.pid)

    def run(self, job: object) -> Any:
        self._connection.send_bytes(pickle.dumps(job))  # ``send`` would share the memory of tensors
        if not self._connection.poll(TIMEOUT_S + 30):
            self.end()
            raise RankFailedError("the processes with the test device do not end")
        return pickle.loads(self._connection.recv_bytes())

    def end(self) -> None:
        if self.pid == os.getpid():
            self._connection.close()
            self._process.kill()
            self._process.wait()


_servers: dict[int, _Server] = {}
"""A server for forks, with the number 0, and processes of ``with_driver`` by their number of devices."""


def _run(world_size: int | None, function: Callable[[int], Any], num_devices: int) -> list[Any]:
    """Run ``function`` on forks of the server, or for None in the process with so many devices that stays."""
    key = 0 if world_size is not None else num_devices
    server = _servers.get(key)
    if server is None or server.pid != os.getpid():
        server = _servers[key] = _Server()
        atexit.register(server.end)
    results, error = server.run((world_size, function, num_devices, os.getcwd()))
    if error:
        raise RankFailedError(error)
    found: list[Any] = results
    return found


def serve(connection: Connection) -> None:
    import torch

    from tests.accelerator.device_module import load

    load()
    torch._dynamo.list_backends()  # imported by an optimizer's first step, in every fork
    while True:
        try:
            world_size, function, num_devices, where = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.chdir(where)
        os.environ["LAGOMTEST_NUM_DEVICES"] = str(num_devices)
        try:
            if world_size is None:
                leaks.seed_generators()
                function(0)
                answer: tuple[list[Any], str] = [], ""
            else:
                answer = on_new_ranks(world_size, functools.partial(_answer, function)), ""
        except RankFailedError as error:
            answer = [], str(error)
        except Exception:
            answer = [], traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))


def _answer(function: Callable[[int], Any], rank: int) -> tuple[bytes, bool]:
    import torch

    torch.set_num_threads(1)
    leaks.seed_generators()
    try:
        return pickle.dumps(("returned", function(rank))), True
    except BaseException:
        return pickle.dumps(("failed", (False, traceback.format_exc()))), False


if __name__ == "__main__":
    # Under the name by which jobs know this file.
    import_module("tests.accelerator.device_processes").serve(Connection(int(sys.argv[1])))
