"""Programs written for Horovod run on lagom: importing this has ``import horovod.torch as hvd`` work, without Horovod.

``horovod``, ``horovod.torch``, ``horovod.spark`` and ``sparkdl`` are then found in lagom, unless they are installed;
``install(force=True)`` takes lagom's also then. Within a lagom run that happens by itself for a program that imports
them. docs/horovod.md tells what is served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lagom.compat.horovod import finder
from lagom.compat.horovod.finder import install, installed, remove

if TYPE_CHECKING:
    from lagom.compat.horovod.runner import HorovodRunner, run

__all__ = ["HorovodRunner", "install", "installed", "remove", "run"]

finder.install()


def leave() -> None:
    """At the end of a run in this process: be no rank of it any more."""
    import sys

    if (world := sys.modules.get("lagom.compat.horovod.world")) is not None:
        world.leave()


def __getattr__(name: str) -> Any:
    if name in ("HorovodRunner", "run"):
        from lagom.compat.horovod import runner

        return getattr(runner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
