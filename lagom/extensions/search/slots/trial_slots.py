"""``TrialSlots``: the slots of a search, each of which runs one trial after another."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lagom.wire.messages import Closed, LocalEvent, Message
from lagom.wire.server import DriverServer

if TYPE_CHECKING:
    from typing import Self  # Python 3.11


class SlotEvent(NamedTuple):
    """Pairs a message with the number of its slot; -1 for the end of Spark's job."""

    slot: int
    message: Message | LocalEvent


class TrialSlots(Protocol):
    """Slots that may join or be lost while a search runs; a context manager that starts and ends them."""

    def __enter__(self) -> TrialSlots:
        """Start the slots; each sends ``SlotJoin`` when it is ready."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """End the slots, and the trials that still run on them."""

    def send(self, slot: int, message: Message) -> None:
        """Send ``message`` to a slot."""

    def serve(self, take: Callable[[int, Message | LocalEvent], None], timeout_s: float) -> None:
        """Call ``take(slot, message)`` with the next message of any slot, if there is one in time.

        Besides the messages of ``trial_host.py`` and its ranks there is ``Closed``, when a slot is lost.

        Raises:
            LagomError: if no slot is left, and none will come.
        """

    def release(self, slot: int) -> bool:
        """Give an idle slot back to the cluster, since no trial is left for it; its ``Closed`` may still follow.

        Return False if the slot stays, as no other application could use it.
        """

    def over(self) -> None:
        """Tell all slots that the search is over, and wait a little for them to end."""


class SlotChannel:
    """Base of slots in other processes: a channel to them, and a queue of their messages.

    Args:
        payload_fd: file with the call, for hosts that fetch it; None if they inherit it.
        lost_s: seconds of silence after which a slot's machine counts as lost.
    """

    def __init__(self, payload_fd: int | None = None, lost_s: float = 20.0) -> None:
        self.events: queue.SimpleQueue[SlotEvent] = queue.SimpleQueue()
        self.channel = DriverServer(self._take, self._close, payload_fd, lost_after_s=lost_s)

    def __enter__(self) -> Self:
        """Start the slots; end those that have started if Ctrl-C or an error comes before all have."""
        try:
            self.begin()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """See ``TrialSlots.__exit__``."""
        raise NotImplementedError

    def begin(self) -> None:
        """Start the slots; ``__exit__`` ends them whether this returns or raises."""
        raise NotImplementedError

    def send(self, slot: int, message: Message) -> None:
        """Send ``message`` to a slot."""
        self.channel.send(slot, message)

    def release(self, slot: int) -> bool:
        """Return False; see ``TrialSlots.release``."""
        return False

    def _next(self, timeout_s: float) -> SlotEvent | None:
        with contextlib.suppress(queue.Empty):
            return self.events.get(timeout=timeout_s)
        return None

    def _take(self, slot: int, message: Message) -> None:
        self.events.put(SlotEvent(slot, message))

    def _close(self, slot: int) -> None:
        self.events.put(SlotEvent(slot, Closed()))
