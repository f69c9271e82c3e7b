"""Horovod's exceptions, by the names that programs catch."""

from __future__ import annotations

from lagom.errors import CollectiveError


class HorovodInternalError(CollectiveError):
    """An exchange failed or will never be done; usually another rank has the cause."""


class WrongArguments(ValueError):
    """Arguments of one rank that no other rank's arguments could fit. Programs catch the ``ValueError``."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed. A lagom run keeps its hosts; programs only name this class."""
