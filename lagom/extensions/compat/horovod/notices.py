"""Short texts that ranks leave for each other in the ranks' store, and the check for waits that take too long."""

from __future__ import annotations

import json
import logging
import os

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lagom.extensions.compat.horovod.exceptions import HorovodInternalError

log = logging.getLogger("lagom")
LOOK_S = 1.0
"""Seconds between two checks of a waiting program."""


class Notices:
    """Writes this rank's notices and reads those of others.

    Args:
        size: number of ranks in the world.
        number: number of worlds that this process has had before.
    """

    def __init__(self, rank: int, size: int, number: int) -> None:
        self._rank = rank
        self._size = size
        self._store = distributed_c10d._get_default_store() if size > 1 else dist.HashStore()
        self._prefix = f"lagom-horovod/{number}"

    def write(self, topic: str, text: str) -> None:
        """Replace this rank's notice under ``topic``."""
        self._store.set(f"{self._prefix}/{topic}/{self._rank}", text)

    def read(self, topic: str, rank: int) -> str:
        """Return the notice of ``rank``, or "" if there is none.

        Raises:
            RuntimeError: when the store has ended.
        """
        key = f"{self._prefix}/{topic}/{rank}"
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""

    def gather(self, topic: str, text: str) -> list[str]:
        """Write a notice, wait for those of all ranks, and return them in rank order."""
        self.write(topic, text)
        return [bytes(self._store.get(f"{self._prefix}/{topic}/{rank}")).decode() for rank in range(self._size)]

    def leave(self) -> None:
        """Tell the others that this rank takes part in nothing more."""
        self.write("left", f"rank {self._rank} has ended, or called shutdown()")


class StallCheck:
    """Warns or raises when a wait takes too long, by the settings of Horovod's stall check."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        is_off = os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
        self._warn_s = 0.0 if is_off else float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", 60))
        self._end_s = 0.0 if is_off else float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0))
        self._warned: set[str] = set()

    def check(self, name: str, seconds: float, pending: list[str], members: tuple[int, ...]) -> None:
        """Check the wait for ``name``, which has taken ``seconds``.

        Args:
            pending: all names that this rank waits for.
            members: the ranks that must ask for ``name``.

        Raises:
            HorovodInternalError: when one of ``members`` has ended, or the wait took longer than the settings allow.
        """
        for member in members:
            if reason := self._reason_for_leaving(member):
                raise HorovodInternalError(f"{name!r} will never be done: {reason}")
        ends = 0 < self._end_s <= seconds
        if not ends and not 0 < self._warn_s <= seconds:
            return
        self._notices.write("pending", json.dumps(pending))
        if not ends and (name in self._warned or seconds < self._warn_s + LOOK_S):
            return  # the other ranks may not have written their names yet
        self._warned.add(name)
        missing = [self._describe(member, asked) for member in members if name not in (asked := self._pending(member))]
        text = f"{name!r} was asked for {seconds:.0f} s ago here, and not by {'; '.join(missing) or 'some rank'}"
        if ends:
            raise HorovodInternalError(text)
        log.warning("%s", text)

    def _reason_for_leaving(self, rank: int) -> str:
        try:
            return self._notices.read("left", rank)
        except RuntimeError as error:
            return f"the ranks' store is gone, and the rank that had it: {error}"

    def _pending(self, rank: int) -> list[str]:
        return list(json.loads(self._notices.read("pending", rank) or "[]"))

    def _describe(self, rank: int, asked: list[str]) -> str:
        return f"rank {rank}, which waits for {', '.join(map(repr, asked[:3])) or 'nothing'}"
