"""``RankStore``: a ``dist.Store`` for ranks of several hosts, over authenticated connections."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lagom.exchange.sockets.value_server import HELD_S, Ask, swap_data

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Base: Any = dist.Store


class RankStore(_Base):  # type: ignore[misc]
    """A store of torch whose values one rank keeps; see ``dist.Store`` for the methods. See Note [Store of ranks].

    Args:
        ask: sends a request to the rank that keeps the values; has the signature of ``ValueServer.ask``.
        timeout: how long ``get`` and ``wait`` wait for a value.
    """

    def __init__(self, ask: Callable[[Ask, str, bytes], bytes | None], timeout: timedelta) -> None:
        super().__init__()
        self._ask_rank = ask
        self.set_timeout(timeout)

    def with_timeout(self, timeout: timedelta) -> RankStore:
        """Return a store of the same values with another timeout."""
        return RankStore(self._ask_rank, timeout)

    def set(self, name: str, value: str | bytes) -> None:
        self._ask(Ask.SET, name, _as_bytes(value))

    def get(self, name: str) -> bytes:
        found = self.awaited(name, self.timeout.total_seconds())
        if found is None:
            raise _late(self.timeout, [name])
        return found

    def awaited(self, name: str, seconds: float) -> bytes | None:
        """Return the value of ``name`` once it is set; None if it is not set within ``seconds``."""
        end = time.monotonic() + seconds
        while True:
            left_s = max(0.0, end - time.monotonic())
            found = self._ask(Ask.AWAIT, name, str(min(left_s, HELD_S)).encode())
            if found is not None or left_s <= HELD_S:
                return found

    def add(self, name: str, number: int) -> int:
        return int(self._ask(Ask.ADD, name, str(number).encode()) or b"0")

    def compare_set(self, name: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        return self._ask(Ask.SWAP, name, swap_data(_as_bytes(expected), _as_bytes(wanted))) or b""

    def check(self, names: Sequence[str]) -> bool:
        return all(self._ask(Ask.HAS, name) is not None for name in names)

    def delete_key(self, name: str) -> bool:
        return self._ask(Ask.DELETE, name) is not None

    def num_keys(self) -> int:
        return int(self._ask(Ask.COUNT, "") or b"0")

    getNumKeys, deleteKey = num_keys, delete_key
    """Names by which torch's PrefixStore calls these methods."""

    def clone(self) -> RankStore:
        return self  # all threads of a rank may share it

    def wait(self, names: Sequence[str], timeout: timedelta | None = None) -> None:
        timeout = timeout or self.timeout
        end = time.monotonic() + timeout.total_seconds()
        if any(self.awaited(name, end - time.monotonic()) is None for name in names):
            raise _late(timeout, names)

    def _ask(self, what: Ask, name: str, data: bytes = b"") -> bytes | None:
        try:
            return self._ask_rank(what, name, data)
        except OSError as error:
            raise dist.DistNetworkError(f"the run's store on rank 0 is out of reach: {error}") from error
        except ValueError as error:
            raise dist.DistStoreError(f"the run's store on rank 0: {error}") from error


def _late(timeout: timedelta, names: Sequence[str]) -> dist.DistStoreError:
    return dist.DistStoreError(f"wait timeout after {1e3 * timeout.total_seconds():.0f}ms, keys: {', '.join(names)}")


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# Note [Store of ranks]
#
# torch's TCPStore listens for as long as it lives, serves every client, and sends unencrypted (torch's wheels lack its
# TLS). So with ranks on several hosts, rank 0 keeps the values, and a thread of lagom serves them. The connections are
# proved and encrypted like those of exchanges: see Note [Proofs of ranks] in handshake.py. Rank 0 listens only until
# all ranks have connected. One connection serves all threads of a rank: each request has a number, and a request for a
# value that is not set is answered when the value is set. So a thousand ranks that wait for each other while they join
# need not poll: each sends one request in 20 s (``HELD_S``). Other features of torch's stores (queues, ``append``, a
# list of keys) are errors here.
