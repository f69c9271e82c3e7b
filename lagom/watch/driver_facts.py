"""``driver_facts``: the driver's process and the versions of its packages, for the records of a run."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import platform
import socket
import sys
from importlib import metadata
from typing import Any

from lagom.watch.secrets import hide_in_command

_PACKAGES = ("torch", "pyspark", "numpy", "pyarrow", "deepspeed")


def driver_facts() -> dict[str, Any]:
    """Return the facts, as JSON takes them."""
    user = None
    with contextlib.suppress(Exception):  # a container's user may have no name
        user = getpass.getuser()
    return {
        "driver": {
            "host": socket.gethostname(),
            "user": user,
            "pid": os.getpid(),
            "cwd": os.getcwd(),
            "argv": hide_in_command(sys.argv),
        },
        "versions": _versions(),
    }


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "lagom": str(sys.modules["lagom"].__version__)}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
