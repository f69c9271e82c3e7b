"""``SealedStore``: named texts that ranks leave for each other, each with an HMAC by the run's key."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from lagom.errors import CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from datetime import timedelta
    from pathlib import Path

    from lagom.exchange.sockets.connect import GatherTexts

_SEAL = 32
_LARGE = 4096
"""Characters above which a text goes into a file of its own, since torch's FileStore never shrinks."""
_HERE, _IN_FILE = "=", "@"
_SOON_S, _LATER_S, _LATEST_S = 0.0002, 0.02, 0.5
_SHARE = 0.05
"""Share of the time waited so far that a rank may sleep before it asks the store again."""
_PAUSE_S = 0.0002
"""A rank's pause between requests, per waiting rank (at first shorter): together they send 5,000 a second at most."""


class SealedStore:
    """Texts by name in a store of torch, each with an HMAC-SHA256 over its name and itself.

    A stranger who reaches the store can read, delete and repeat texts, but cannot forge or change one. Counts, and the
    existence of a name, are not sealed.

    Args:
        key: the run's key; empty if only the ranks reach the store.
        folder: folder for the files of large texts; None if the ranks have no common folder.
    """

    def __init__(self, store: dist.Store, key: bytes, folder: Path | None = None) -> None:
        self._store = store
        self._wait: Callable[[str, float], bytes | None] | None = getattr(store, "awaited", None)
        """``RankStore.awaited``; None for torch's own stores, which are polled since they log a wait that times out."""
        self._key = key
        self._folder = folder

    def set(self, name: str, text: str) -> None:
        """Leave ``text`` under ``name``."""
        held = _HERE + text
        if self._folder is not None and len(text) > _LARGE:
            _file(self._folder, name).write_bytes(text.encode())
            held = _IN_FILE
        self._store.set(_place(name), self._seal(name, text) + held)

    def get(self, name: str) -> str:
        """Return the text under ``name``, once it is there.

        Raises:
            RuntimeError: when there is no text in time, or the text is not from a rank of this run.
        """
        return self._opened(name, self._store.get(_place(name)))

    def _opened(self, name: str, sealed: bytes) -> str:
        found = bytes(sealed).decode()
        seal, text = found[:_SEAL], found[_SEAL + 1 :]
        if self._folder is not None and found[_SEAL:] == _IN_FILE:
            text = _file(self._folder, name).read_bytes().decode()
        if not hmac.compare_digest(seal.encode(), self._seal(name, text).encode()):
            raise RuntimeError(f"what is in the ranks' store as {name!r} does not come from a rank of this run")
        return text

    def check(self, name: str) -> bool:
        """Return whether there is a text under ``name``."""
        return bool(self._store.check([_place(name)]))

    def wait(self, name: str, timeout_s: float) -> None:
        """Wait until there is a text under ``name``.

        Raises:
            TimeoutError: when there is none in time.
        """
        self._awaited(name, timeout_s)

    def awaited(self, name: str, timeout_s: float, num_waiting: int = 1) -> str:
        """Return the text under ``name``, once it is there.

        Args:
            num_waiting: how many ranks may be waiting at the same time.

        Raises:
            TimeoutError: when there is no text in time.
            RuntimeError: when the text is not from a rank of this run.
        """
        return self._opened(name, self._awaited(name, timeout_s, num_waiting=num_waiting))

    def _awaited(self, name: str, timeout_s: float, unless: str = "", num_waiting: int = 1) -> bytes:
        """Return the sealed text under ``name``, once it is there; see ``awaited`` and ``receive``."""
        longest_pause_s = max(_LATER_S, _PAUSE_S * num_waiting)
        start, pause_s = time.monotonic(), max(_SOON_S, _PAUSE_S * num_waiting / 10)
        while True:
            waited_s = time.monotonic() - start
            is_last = waited_s > timeout_s or (bool(unless) and self.check(unless))
            value: bytes | None = None
            if self._wait is not None:
                seconds = 0.0 if is_last else pause_s if unless else max(0.0, timeout_s - waited_s)
                value = self._wait(_place(name), seconds)
            elif self.check(name):
                value = self._store.get(_place(name))
            if value is not None:
                return value
            if is_last:
                raise TimeoutError(f"no rank has left {name!r} within {timeout_s:.0f} s")
            if self._wait is None:
                time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, max(longest_pause_s, _SHARE * waited_s), max(longest_pause_s, _LATEST_S))

    def receive(self, name: str, num_readers: int, timeout_s: float, unless: str = "") -> str:
        """Return the text under ``name``, once it is there; the last of ``num_readers`` ranks to read it deletes it.

        Raises:
            TimeoutError: when there is no text in time, or a text under the name ``unless`` comes first.
            CollectiveError: when the store is gone, or the text is not from a rank of this run.
        """
        try:
            text = self._opened(name, self._awaited(name, timeout_s, unless))
            if self._store.add(_place(name + "/read"), 1) == num_readers:
                if self._folder is not None:
                    _file(self._folder, name).unlink(missing_ok=True)
                self._store.delete_key(_place(name))
                self._store.delete_key(_place(name + "/read"))
        except RuntimeError as error:
            raise CollectiveError(f"{name!r} of another rank did not arrive, it may be gone: {error}") from error
        return text

    def _seal(self, name: str, text: str) -> str:
        return hmac.digest(self._key, f"{name}\0{text}".encode(), "sha256").hex()[:_SEAL]


def _place(name: str) -> str:
    return f"lagom/{name}"


def _file(folder: Path, name: str) -> Path:
    return folder / f"note-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def all_gather_by(store: SealedStore, name: str, rank: int, world_size: int, timeout_s: float) -> GatherTexts:
    """Return an all-gather of texts through ``store``, with which the ranks set up faster exchanges.

    Raises:
        TimeoutError: from the all-gather, when a rank does not call it in time.
    """
    num = 0

    def all_gather(data: bytes, wanted: Collection[int] | None = None) -> list[bytes]:
        nonlocal num
        num += 1
        place = f"{name}/{num}"
        if data or wanted is None:
            store.set(f"{place}/{rank}", data.decode())
        if wanted is not None:
            return [
                store.awaited(f"{place}/{peer}", timeout_s).encode() if peer in wanted else b""
                for peer in range(world_size)
            ]
        if rank == 0:
            # One rank reads all texts: if every rank did, a thousand ranks would ask the store a million times.
            texts = [store.awaited(f"{place}/{peer}", timeout_s) for peer in range(world_size)]
            places = {text: i for i, text in enumerate(dict.fromkeys(texts))}  # most are equal: ranks of one host
            store.set(place, json.dumps([list(places), [places[text] for text in texts]]))
        else:
            different, order = json.loads(store.awaited(place, timeout_s, world_size - 1))
            texts = [different[i] for i in order]
        return [text.encode() for text in texts]

    return all_gather


def reconnected(store: dist.Store, timeout: timedelta | None = None) -> dist.Store:
    """Return another client of ``store``, a FileStore or ``RankStore``; long waits in ``store`` do not block it."""
    known: Any = store
    if not isinstance(store, dist.FileStore):
        return cast("dist.Store", known.with_timeout(timeout or known.timeout))
    again = dist.FileStore(known.path, -1)
    again.set_timeout(timeout or known.timeout)
    return again
