"""``PayloadRelay``: tells each host where to copy the payload from: the driver, or another host."""

from __future__ import annotations

import asyncio

from lagom.wire.connection import DriverConnection
from lagom.wire.framing import Message, body_of
from lagom.wire.payload_sources import PayloadSources


class PayloadRelay:
    """Serves the hosts that want or have the payload; a host stays connected as long as it gives copies to others.

    All methods are called in the channel's thread.

    Args:
        size: bytes of the payload.
    """

    def __init__(self, size: int) -> None:
        self._sources = PayloadSources(size)
        self._hosts: set[DriverConnection] = set()
        self._timer: asyncio.TimerHandle | None = None

    def serve(self, host: DriverConnection) -> None:
        """Tell ``host`` sources, one after the other, until it has the payload; then offer ``host`` as a source."""
        self._hosts.add(host)
        self._sources.add(host)
        self._assign()
        host.serve(lambda message: self._take(host, message))

    def forget(self, host: DriverConnection) -> None:
        """Forget ``host``, whose connection has ended."""
        self._hosts.discard(host)
        self._sources.remove(host)
        self._assign()

    def end(self) -> None:
        """Close the connections of all hosts, which then give the payload to no other host."""
        if self._timer is not None:
            self._timer.cancel()
        for host in list(self._hosts):
            host.close()

    def _take(self, host: DriverConnection, message: Message) -> None:
        if message["type"] == "complete":
            name, port = message["address"]
            self._sources.complete(host, (str(name), int(port)))
        else:
            self._sources.fail(host)
        self._assign()

    def _assign(self) -> None:
        for host, source, within_s in self._sources.assign():
            assert isinstance(host, DriverConnection)
            host.send(body_of({"type": "take", "source": source, "within_s": within_s}))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sources.has_waiting:  # assign again when copies in progress may count as slow
            self._timer = asyncio.get_running_loop().call_later(self._sources.patience_s, self._assign)
