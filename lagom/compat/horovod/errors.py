"""Exceptions by the names that programs catch."""

from __future__ import annotations

from lagom.errors import CollectiveError


class HorovodInternalError(CollectiveError):
    """An exchange failed, or never came about; as a rule another rank has the cause."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts came or went, which they do not in a lagom run; programs may name it.

    Args:
        skip_sync: whether the state need not be sent round again.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync
