"""``advice``: one line about an error of a program that says what to do, if lagom knows that."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lagom.plan import Package
from lagom.program.missing_packages import missing_packages, missing_text

_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NO_GROUP = "Default process group has not been initialized"


def advice(
    error: BaseException, packages: Sequence[Package], *, already_distributed: bool = False, ships: bool = False
) -> str:
    """Return a line that says what to do about ``error``, which a program raised in this process; "" if unknown.

    Args:
        packages: the driver's packages that the program imports.
        ships: whether the run sends packages.
    """
    said = error.args[0] if error.args else None
    if isinstance(error, ModuleNotFoundError):
        missing = missing_packages(packages)
        if not any(f"{error.name}.".startswith(f"{package.name}.") for package in missing):
            return ""
        return f"lagom: {missing_text(missing, ships=ships)}"
    if already_distributed or type(said) is not str:
        return ""
    if isinstance(error, KeyError) and said in _OF_TORCHRUN and _is_of_environment(error):
        return (
            f"lagom: {said} is not set, since this program starts no process group and lagom distributes it: drop what "
            "reads it, or ask lagom.rank() and lagom.world_size()"
        )
    if isinstance(error, (ValueError, RuntimeError)) and said.startswith(_NO_GROUP):
        return (
            "lagom: this program starts no process group, so lagom shares its batches out and averages its gradients: "
            "drop DistributedSampler, DDP and calls of torch.distributed, or call init_process_group before them"
        )
    return ""


def _is_of_environment(error: BaseException) -> bool:
    """Return whether ``os.environ`` raised ``error``."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == os.__name__
