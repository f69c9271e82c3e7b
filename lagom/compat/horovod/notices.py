"""``Notices``: what ranks leave for each other in torch's store, to be read by who waits for them."""

from __future__ import annotations

import json
from typing import Any


class Notices:
    """Reads and writes notices of one world.

    Args:
        store: torch's, which all ranks reach; None for a single rank.
    """

    def __init__(self, store: Any, rank: int, number: int) -> None:
        self._store = store
        self._rank = rank
        self._prefix = f"lagom-horovod/{number}"

    def leave(self) -> None:
        """This rank takes part in nothing more."""
        self._set("left", f"rank {self._rank} has ended, or called shutdown()")

    def left(self, rank: int) -> str:
        """Why ``rank`` takes part in nothing more; "" as long as it does."""
        return self._get("left", rank)

    def tell_pending(self, names: list[str]) -> None:
        """This rank waits for these."""
        self._set("pending", json.dumps(names))

    def pending(self, rank: int) -> list[str]:
        """What ``rank`` said last that it waits for."""
        return list(json.loads(self._get("pending", rank) or "[]"))

    def _set(self, what: str, text: str) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}/{what}/{self._rank}", text)

    def _get(self, what: str, rank: int) -> str:
        if self._store is None:
            return ""
        key = f"{self._prefix}/{what}/{rank}"
        try:
            return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""
        except RuntimeError as error:
            return f"the ranks' store is gone, and the rank that had it: {error}" if what == "left" else ""
