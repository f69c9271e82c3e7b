"""``ViewPart``: an extension's part in the driver's view of an attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lagom.wire.messages import LocalEvent, Message


class ViewPart(Protocol):
    """Takes messages of tasks, and shows what comes of them."""

    def take(self, task: int, message: Message) -> bool:
        """Handle a message of a task, in the channel's thread; return whether it is one of this part's."""

    def show(self, event: Message | LocalEvent, write: Callable[[str], None], say: Callable[[str], None]) -> bool:
        """Show an event by ``write`` (as output) or ``say`` (as a line of lagom's); return whether it is this part's.

        Raises:
            LagomError: if the user ends the run.
        """

    def close(self) -> None:
        """End what waits for the user: the run is over."""
