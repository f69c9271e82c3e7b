"""``PayloadSources``: chooses from where each host takes a run's payload. See Note [Payload between hosts]."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

MOST_FROM_DRIVER = 3
"""Copies that the driver sends as long as hosts can send others."""
_LEAST_PATIENCE_S = 2.0
_FIRST_PATIENCE_S = 5.0
_MOST_FAILURES = 2
"""Failures after which a source is given up, or a host is not hurried any more."""
_SLOW_BYTES_PER_S = 50e6
"""Rate that is expected of the first copy."""
_NOBODY = object()
Address = tuple[str, int]


class Assignment(NamedTuple):
    """A host, and from where it is to take the payload."""

    host: Hashable
    source: Address | None
    """Address of another host; None is the driver."""
    within_s: float | None
    """Seconds after which the host should give the source up; None: it should not."""


class _Copy(NamedTuple):
    source: Hashable | None
    since: float


class PayloadSources:
    """Assigns to each host of a run that wants its payload one that has it, or the driver.

    Args:
        size: bytes of the payload.
        clock: the time in seconds.
    """

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_patience_s = _FIRST_PATIENCE_S + size / _SLOW_BYTES_PER_S
        self._waiting: dict[Hashable, set[Hashable]] = {}
        """Hosts without a source, and those from which they could not take it."""
        self._copying: dict[Hashable, tuple[_Copy, set[Hashable]]] = {}
        self._complete: dict[Hashable, Address] = {}
        self._num_served: dict[Hashable | None, int] = {None: 0}
        self._num_failed: dict[Hashable | None, int] = {}
        """Hosts that could not take it from a source since the last that could."""
        self._durations: list[float] = []

    @property
    def patience_s(self) -> float:
        """Seconds after which a copy counts as slow: its source is given to another host as well."""
        if not self._durations:
            return self._first_patience_s
        return max(_LEAST_PATIENCE_S, 4 * statistics.median(self._durations))

    @property
    def has_waiting(self) -> bool:
        """Whether hosts wait for a source."""
        return bool(self._waiting)

    def add(self, host: Hashable) -> None:
        """Note that ``host`` wants the payload."""
        self._waiting[host] = set()

    def complete(self, host: Hashable, address: Address) -> None:
        """Note that ``host`` has the payload, and gives it at ``address``."""
        copying = self._copying.pop(host, None)
        if copying is not None:
            self._durations.append(self._clock() - copying[0].since)
            self._num_failed[copying[0].source] = 0
        self._complete[host] = address
        self._num_served[host] = 0

    def fail(self, host: Hashable) -> None:
        """Note that ``host`` could not take the payload from its source, and wants another one."""
        if (copying := self._copying.pop(host, None)) is None:
            return
        (source, _), avoided = copying
        self._waiting[host] = avoided | {source}
        self._num_failed[source] = self._num_failed.get(source, 0) + 1
        if self._num_failed[source] >= _MOST_FAILURES:
            self._complete.pop(source, None)

    def remove(self, host: Hashable) -> None:
        """Note that ``host`` is gone."""
        self._waiting.pop(host, None)
        self._copying.pop(host, None)
        self._complete.pop(host, None)

    def assign(self) -> list[Assignment]:
        """Return sources for the hosts that can begin now."""
        found = []
        now, patience_s = self._clock(), self.patience_s
        busy = {copy.source for copy, _ in self._copying.values() if now - copy.since < patience_s}
        for host, avoided in list(self._waiting.items()):
            source = self._choose(avoided, busy)
            if source is _NOBODY:
                continue
            del self._waiting[host]
            self._copying[host] = _Copy(source, now), avoided
            self._num_served[source] += 1
            busy.add(source)
            hurries = source is not None and len(avoided) < _MOST_FAILURES
            address = None if source is None else self._complete[source]
            found.append(Assignment(host, address, 2 * patience_s if hurries else None))
        return found

    def _choose(self, avoided: Collection[Hashable], busy: Collection[Hashable | None]) -> Hashable | None:
        """Return the source of the next copy: a host, or None for the driver; or ``_NOBODY``."""
        if free := (self._complete.keys() - busy).difference(avoided):
            return min(free, key=self._num_served.__getitem__)
        hosts_will = bool(busy or self._complete.keys() - avoided)
        if None in busy or (hosts_will and self._num_served[None] >= MOST_FROM_DRIVER):
            return _NOBODY
        return None


# Note [Payload between hosts]
#
# The payload of a call may have gigabytes. If the driver sent it to each host, its network would be busy for as many
# times as there are hosts. So a host that has the payload gives it to others. Driver and hosts give it to one host at a
# time: the number of copies doubles in the time of one copy, and 32 hosts have it after 6 of these times. The driver
# sends 3 copies, and more only where no host can: none has it, or those that have it have failed.
#
# A slow host keeps nobody waiting. A copy that takes four times as long as others no longer counts: its source serves
# another host meanwhile, and after twice this time, or 10 s without a byte, the host gives up its source, keeps what it
# has, and asks for another source, at last the driver. A source that two hosts have given up serves no other; a host
# that has given up two sources is slow itself, and has all the time that it needs.
#
# Hosts accept connections as the driver does (Note [Handshake] in framing.py), with the run's secret; where Spark
# encrypts, also with the key and certificate of the run's ranks (Note [Encryption] in tls.py). What arrives is used
# only if it has the SHA-256 that came inside Spark's job.
