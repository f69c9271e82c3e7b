"""Launchers, which start ranks; each has a file of its own. ``choose`` returns the launcher that a config names."""

from __future__ import annotations

import sys
from typing import Any

from lagom.config.torch_distributed import Launcher as LauncherName
from lagom.driver.protocol import Launcher


def choose(name: LauncherName) -> Launcher:
    """Return the launcher called ``name``; "auto" is Spark if a Spark session is active, else local.

    "spark" starts a session if none is active.

    Raises:
        LagomError: if a launcher for Spark is wanted, and PySpark or Java is missing, or Spark does not start.
    """
    if name == "auto":
        name = "spark" if active_session() is not None else "local"
    if name == "spark":
        from lagom.spark.spark import SparkLauncher

        return SparkLauncher(active_session())
    if name == "inline":
        from lagom.driver.inline import InlineLauncher

        return InlineLauncher()
    from lagom.driver.local import LocalLauncher

    return LocalLauncher()


def active_session() -> Any:
    """Return the running SparkSession of this process, classic or Connect, or None; do not import pyspark."""
    for name in ("pyspark.sql.session", "pyspark.sql.connect.session"):
        module = sys.modules.get(name)
        session = module.SparkSession.getActiveSession() if module else None
        if session is None and module is not None:
            # The active session belongs to a thread; these belong to the process.
            session = getattr(module.SparkSession, "_instantiatedSession", None)
            session = session or getattr(module.SparkSession, "_default_session", None)  # Connect's
        if session is not None and _alive(session):
            return session
    return None


def _alive(session: Any) -> bool:
    if hasattr(session, "is_stopped"):
        return not session.is_stopped
    context = getattr(session, "_sc", None)
    return context is None or context._jsc is not None
