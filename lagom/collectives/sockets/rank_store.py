"""``RankStore``: torch's store between ranks of several hosts, over connections that both ends have proved."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lagom.collectives.sockets.value_server import Ask, swap_data

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SOON_S, _LATER_S, _LATEST_S = 0.0002, 0.02, 0.5
_SHARE = 0.05  # of the time waited so far: each question takes time of rank 0's, for which others may wait
_Base: Any = dist.Store


class RankStore(_Base):  # type: ignore[misc]
    """A store of torch whose values one rank keeps; see ``dist.Store`` for the methods. See Note [Store of ranks].

    Args:
        ask: asks that rank, as ``ValueServer.ask``.
        timeout: how long a value is waited for.
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
        self.wait([name])
        found = self._ask(Ask.GET, name)
        if found is None:
            raise dist.DistStoreError(f"{name!r} was deleted from the ranks' store meanwhile")
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
    """Names by which torch's PrefixStore calls them."""

    def clone(self) -> RankStore:
        return self  # all threads of a rank may share it

    def wait(self, names: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self.timeout).total_seconds()
        start, pause_s = time.monotonic(), _SOON_S
        while not self.check(names):
            waited_s = time.monotonic() - start
            if waited_s > seconds:
                raise dist.DistStoreError(f"wait timeout after {1e3 * seconds:.0f}ms, keys: {', '.join(names)}")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, max(_LATER_S, _SHARE * waited_s), _LATEST_S)

    def _ask(self, what: Ask, name: str, data: bytes = b"") -> bytes | None:
        try:
            return self._ask_rank(what, name, data)
        except OSError as error:
            raise dist.DistNetworkError(f"the run's store on rank 0 is out of reach: {error}") from error
        except ValueError as error:
            raise dist.DistStoreError(f"the run's store on rank 0: {error}") from error


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# Note [Store of ranks]
#
# torch's TCPStore listens for as long as it lives and serves everybody, and sends in clear (its TLS is not in torch's
# wheels). So where ranks are on several hosts, rank 0 keeps the values and serves them by a thread of lagom's, over
# connections that are proved, and encrypted where Spark encrypts, as those of exchanges are. It listens only until all
# ranks have connected. Waiting is asking again, so one connection serves all threads of a rank. What else stores of
# torch have (queues, ``append``, a list of keys) is an error here.
