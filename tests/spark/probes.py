"""Tasks for the fork server of an executor, which need no Spark."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lagom


@dataclass(frozen=True)
class Facts:
    """Tells what its host process has from the server, and what from the worker."""

    def run(
        self, files: Sequence[int], gather: Callable[[str], Sequence[str]], take_payload: Callable[[str], None]
    ) -> None:
        """Write to the first file."""
        sys.argv[:] = ["program"]  # as a rank does
        facts = {
            "lagom": importlib.reload(lagom).__file__,
            "server": os.getppid(),
            "torch": "torch" in sys.modules,
            "env": dict(os.environ),
            "cwd": os.getcwd(),
            "sys_path": sys.path,
            "gathered": gather("mine"),
        }
        os.write(files[0], json.dumps(facts).encode())


@dataclass(frozen=True)
class TakesPayload:
    """Has the worker write the payload."""

    path: str

    def run(
        self, files: Sequence[int], gather: Callable[[str], Sequence[str]], take_payload: Callable[[str], None]
    ) -> None:
        """Write the content of the payload to the first file."""
        take_payload(self.path)
        with open(self.path, "rb") as payload:
            os.write(files[0], json.dumps(payload.read().decode()).encode())


@dataclass(frozen=True)
class Sleeps:
    """Writes the numbers of its processes, and does not end by itself."""

    def run(
        self, files: Sequence[int], gather: Callable[[str], Sequence[str]], take_payload: Callable[[str], None]
    ) -> None:
        """Write to the first file, and sleep."""
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        os.write(files[0], json.dumps([os.getpid(), child, os.getppid()]).encode())
        time.sleep(1000)
