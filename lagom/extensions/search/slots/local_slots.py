"""``LocalSlots``: the slots of a search as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from collections.abc import Callable

from lagom.cluster import visible_devices
from lagom.driver.local import server, spec_of
from lagom.errors import LagomError
from lagom.extensions.search.on_rank.messages import SearchOver, SlotJoin
from lagom.extensions.search.slots.trial_slots import SlotChannel
from lagom.plan import Plan
from lagom.program.payload import Parcel
from lagom.program.signature import Call
from lagom.wire.framing import anonymous_file
from lagom.wire.messages import Closed, LocalEvent, Lost, Message, Stop

_END_S = 1.5  # time for slots to end trials that still run
_MOST_LOST = 3  # a search fails after this many lost processes per slot without a join of any slot in between


class LocalSlots(SlotChannel):
    """Host processes, forked from this process's fork server; one that is killed is replaced."""

    def __init__(self, plan: Plan, call: Call, num_slots: int) -> None:
        super().__init__()
        self._plan = plan
        self._num_slots = num_slots
        self._stack = contextlib.ExitStack()
        parcel = Parcel(call)  # before the file is open: it is an error if the call cannot be pickled
        self._payload = anonymous_file("payload")
        self._stack.callback(os.close, self._payload)
        self._spec = spec_of(plan, parcel.write(self._payload))
        self._open: set[int] = set()
        self._num_lost = 0
        self._why = ""
        """The last error with which a process ended, as the end of a sentence."""

    def begin(self) -> None:
        """See ``SlotChannel.begin``."""
        self._stack.enter_context(self.channel)
        for number in range(self._num_slots):
            self._start(number)

    def __exit__(self, *exc: object) -> None:
        """End the slots, and the trials that still run on them."""
        self.over()
        self._stack.close()

    def serve(self, take: Callable[[int, Message | LocalEvent], None], timeout_s: float) -> None:
        """See ``TrialSlots.serve``."""
        event = self._next(timeout_s)
        if event is None:
            return
        if isinstance(event.message, SlotJoin):
            self._num_lost, self._why = 0, ""
        if isinstance(event.message, Lost):
            self._why = f": {event.message.message}"
        if isinstance(event.message, Closed):
            self._open.discard(event.slot)
            self._num_lost += 1
            if self._num_lost >= _MOST_LOST * self._num_slots:
                ended = "processes of this machine that were to run trials ended as soon as they started"
                raise LagomError(ended + self._why)
            self._start(event.slot)
        take(*event)

    def over(self) -> None:
        """Tell all slots that the search is over, and wait a little for them to end."""
        self.channel.broadcast(Stop())
        self.channel.broadcast(SearchOver())
        deadline = time.monotonic() + _END_S
        while self._open and (left_s := deadline - time.monotonic()) > 0:
            event = self._next(left_s)
            if event is not None and isinstance(event.message, Closed):
                self._open.discard(event.slot)

    def _start(self, slot: int) -> None:
        width = self._plan.world_size
        gpus = visible_devices()[slot * width : (slot + 1) * width] if self._plan.gpu else ()
        ours, theirs = socket.socketpair()
        with theirs:
            self._open.add(slot)
            self.channel.adopt(ours, slot)
            server().send(pickle.dumps((self._spec, gpus)), [theirs.fileno(), self._payload])
