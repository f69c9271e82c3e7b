"""``PayloadSources``: chooses the source from which each host copies the payload. See Note [Payload between hosts]."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

MOST_FROM_DRIVER = 3
"""Most copies that the driver sends while hosts can send the others."""
_LEAST_PATIENCE_S = 2.0
_FIRST_PATIENCE_S = 5.0
_MOST_FAILURES = 2
"""Failed copies in a row after which a host is no source any more; a host whose own copies have failed as often gets no
more time limits."""
_SLOW_BYTES_PER_S = 50e6
"""Rate below which the first copies count as slow."""
_NOBODY = object()
Address = tuple[str, int]


class Assignment(NamedTuple):
    """A host, and the source from which it must copy the payload."""

    host: Hashable
    source: Address | None
    """Address of another host; None is the driver."""
    within_s: float | None
    """Seconds after which the host must give the source up; None for no limit."""


class _Copy(NamedTuple):
    source: Hashable | None
    since: float


class PayloadSources:
    """Assigns to each host that wants the payload a source: a host that has the payload, or the driver.

    Args:
        size: bytes of the payload.
        clock: returns the time in seconds.
    """

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_patience_s = _FIRST_PATIENCE_S + size / _SLOW_BYTES_PER_S
        self._waiting: dict[Hashable, set[Hashable]] = {}
        """Hosts that wait for a source, each with the sources from which it could not copy the payload."""
        self._copying: dict[Hashable, tuple[_Copy, set[Hashable]]] = {}
        self._complete: dict[Hashable, Address] = {}
        self._num_served: dict[Hashable | None, int] = {None: 0}
        self._num_failed: dict[Hashable | None, int] = {}
        """For each source the number of failed copies since its last successful copy."""
        self._durations: list[float] = []

    @property
    def patience_s(self) -> float:
        """Seconds after which a copy counts as slow, so that its source is assigned to another host as well."""
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
        """Note that ``host`` has the payload, and serves it at ``address``."""
        copying = self._copying.pop(host, None)
        if copying is not None:
            self._durations.append(self._clock() - copying[0].since)
            self._num_failed[copying[0].source] = 0
        self._complete[host] = address
        self._num_served[host] = 0

    def fail(self, host: Hashable) -> None:
        """Note that ``host`` could not copy the payload from its source, and wants another source."""
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
        """Return a source for each waiting host that can begin its copy now."""
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
        """Return the source of the next copy: a host, None for the driver, or ``_NOBODY`` if the host must wait.

        Args:
            avoided: sources from which the copying host could not copy.
            busy: sources of copies in progress that are not slow.
        """
        if free := (self._complete.keys() - busy).difference(avoided):
            return min(free, key=self._num_served.__getitem__)
        hosts_will = bool(busy or self._complete.keys() - avoided)
        if None in busy or (hosts_will and self._num_served[None] >= MOST_FROM_DRIVER):
            return _NOBODY
        return None


# Note [Payload between hosts]
#
# The payload of a call may have gigabytes. If the driver sent it to each host, the driver's network would be busy for
# the time of one copy for each host. So a host that has the payload sends it to other hosts. The driver and each host
# send one copy at a time: the number of copies doubles in the time of one copy, and 32 hosts have the payload after 6
# of these times. The driver sends 3 copies, and more only if no host can send one: no host has the payload, or copies
# from all hosts that have it have failed.
#
# A slow host delays no other host. If a copy takes four times as long as others, its source is free to serve another
# host meanwhile. After twice this time, or 10 s without a byte, the slow host gives up its source (unless this is the
# driver), keeps the bytes that have arrived, and asks for another source, at last the driver. A source that hosts have
# given up twice in a row is used no more. A host that has given up two sources is slow itself, and gets no more time
# limits for a whole copy.
#
# Hosts accept connections like the driver (Note [Handshake] in framing.py), by a proof of the run's secret; if Spark
# encrypts, also by the certificate of the run's ranks (Note [Encryption] in tls.py). A copy is used only if it has the
# SHA-256 that came inside Spark's job.
