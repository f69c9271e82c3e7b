"""``DriverLink``: sends a host process's messages to the driver; without a connection, keeps some for the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lagom.watch.messages import OWN, Picture, Timeline
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.messages import Log, Message, RankReport

_UNSAID = 200_000  # characters of output that are sent with the results if there is no connection


class DriverLink:
    """Sends messages to the driver as long as its connection is there."""

    def __init__(self, client: DriverClient | None) -> None:
        self._client = client
        self._unsaid: list[Log] = []
        """Rank 0's output while there was no connection, to be sent with the results."""
        self._blocks: dict[int, list[Timeline | Picture]] = {}
        """Timeline blocks by rank, kept if there is no connection; ``Spans`` bounds their size."""

    @property
    def is_open(self) -> bool:
        """Whether there is a connection to the driver."""
        return self._client is not None

    def give_up(self) -> None:
        """Send nothing from now on: the driver has ended, or has given this process up."""
        self._client = None

    def send(self, message: Message | bytes, sure: bool = False) -> None:
        """Send ``message``, or the body of a rank's frame, if there is a connection.

        It may be dropped if the driver is slow, unless ``sure``.
        """
        if self._client is None:
            return
        try:
            if sure:
                self._client.send(message)
            else:
                self._client.offer(message)
        except LinkClosed:
            self._client = None

    def send_block(self, block: Timeline | Picture) -> None:
        """Send ``block`` of a rank's timeline, or keep it."""
        if self._client is not None:
            self.send(block)
        else:
            self._blocks.setdefault(block.rank, []).append(block)

    def show(self, stream: str, data: str) -> None:
        """Show output of rank 0 to the user, or keep it."""
        message = Log(rank=0, stream=stream, data=data)
        if self._client is not None:
            self.send(message)
        elif sum(len(kept.data) for kept in self._unsaid) < _UNSAID:
            self._unsaid.append(message)

    def say(self, text: str) -> None:
        """Show ``text`` of lagom's to the user on standard error."""
        self.show(OWN, text.encode(errors="backslashreplace").decode("latin-1"))

    def waiting(self) -> bool:
        """Return whether messages are left that the connection has not accepted."""
        return self._client is not None and self._client.waiting()

    def flush(self) -> None:
        """Send what waits, and end the connection to a driver that has been silent for too long."""
        if self._client is None:
            return
        self._client.give_up_silent()
        try:
            self._client.flush()
        except LinkClosed:
            self._client = None

    def with_unsaid(self, reports: Sequence[RankReport]) -> list[RankReport]:
        """Return ``reports`` with rank 0's output and the timeline that no connection has carried to the driver."""
        found = []
        for report in reports:
            output = [*(self._unsaid if report.rank == 0 else ()), *self._blocks.get(report.rank, ())]
            found.append(dataclasses.replace(report, output=output))
        return found
