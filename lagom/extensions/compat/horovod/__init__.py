"""Runs programs written for Horovod: after this import ``import horovod.torch as hvd`` works, without Horovod.

``horovod``, ``horovod.torch``, ``horovod.spark`` and ``sparkdl`` are then found in lagom, unless they are installed;
``install(force=True)`` serves lagom's modules even then. Within a lagom run of a program whose own code names Horovod,
the program's import of one of these modules imports this package. docs/horovod.md lists the names that are served.

Start reading in torch.py, the names that programs use. A call goes from differentiable.py (or distributed_optimizer.py)
to asynchronous.py, which makes requests; negotiation.py waits until all ranks have asked, by the rules in matching.py;
exchange.py does the exchange. topology.py and process_sets.py know the ranks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lagom.extensions.compat.horovod.horovod_modules import served

if TYPE_CHECKING:
    from lagom.extensions.compat.horovod.horovod_runner import HorovodRunner, run

__all__ = ["HorovodRunner", "install", "installed", "remove", "run"]

install, installed, remove = served.install, served.installed, served.remove
install()


def leave() -> None:
    """Shut Horovod down if the program called ``hvd.init`` in this lagom run; called at the end of the run."""
    if (topology := sys.modules.get("lagom.extensions.compat.horovod.topology")) is not None:
        topology.leave()


def __getattr__(name: str) -> Any:
    if name in ("HorovodRunner", "run"):
        from lagom.extensions.compat.horovod import horovod_runner

        return getattr(horovod_runner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
