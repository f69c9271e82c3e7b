"""``missing_packages``: those of the driver's packages that this process's Python lacks, and what to do about them."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Collection, Sequence

from lagom.plan import Package


def missing_packages(packages: Sequence[Package], shipped: Collection[str] = ()) -> list[Package]:
    """Return those of ``packages`` that this process cannot import; none is imported.

    Args:
        shipped: distributions that are sent with the run.
    """
    return [package for package in packages if package.distribution not in shipped and not is_importable(package.name)]


def is_importable(name: str) -> bool:
    """Return whether this process finds the module ``name``; only packages around it are imported."""
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def missing_text(missing: Sequence[Package], *, ships: bool = False) -> str:
    """Return a line that names ``missing`` with their versions on the driver, and what to do.

    Args:
        ships: whether the run sends packages, so that the missing ones cannot be sent.
    """
    which = " and ".join(filter(None, (", ".join(map(str, missing[:-1])), str(missing[-1]))))
    them = "them" if len(missing) > 1 else "it"
    has = f"and the driver has {them}"
    return f"{platform.node()} lacks {which} in its Python, {sys.executable}, {has}: {remedy(missing, ships=ships)}"


def remedy(missing: Sequence[Package], *, ships: bool = False) -> str:
    """Return what to do about ``missing``, as for ``missing_text``."""
    them = "them" if len(missing) > 1 else "it"
    ship = f"packages='ship' cannot send {them}: {'they have' if len(missing) > 1 else 'it has'} compiled parts"
    if not ships:
        ship = "or, for packages without compiled parts, set packages='ship'"
    pack = "send the driver's environment ('lagom pack' makes the archive and prints Spark's settings)"
    return f"install {them} there; or {pack}; {ship}"
