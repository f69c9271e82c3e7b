"""``lagom.wire.payload_sources``: who gives the payload to whom, by a clock of the test's own."""

from __future__ import annotations

from collections import Counter

import pytest

from lagom.wire.payload_sources import MOST_FROM_DRIVER, PayloadSources


class Network:
    """Hosts that take a payload, each in its own time, of which each source sends one at its full speed."""

    def __init__(self, num_hosts: int, seconds: dict[int, float] | None = None, failing: frozenset[int] = frozenset()):
        self.now = 0.0
        self.sources = PayloadSources(1_000_000_000, lambda: self.now)
        self.seconds = seconds or {}
        self.failing = failing
        self.sent: Counter[int] = Counter()
        """Copies that each source has begun; the driver is -1."""
        self.ends: dict[int, float] = {}
        """Time at which each host has the payload."""
        self._under_way: list[tuple[float, int, bool]] = []
        for host in range(num_hosts):
            self.sources.add(host)

    def run(self) -> float:
        """Let all hosts take the payload; return when the last of the quick ones has it."""
        self._assign()
        for _ in range(10_000):
            looks_at = self.now + self.sources.patience_s if self.sources.has_waiting else float("inf")
            first = min(self._under_way, default=(float("inf"), -1, True))
            if min(first[0], looks_at) == float("inf"):
                break
            self.now = min(first[0], looks_at)
            if first[0] <= looks_at:
                self._under_way.remove(first)
                _, host, arrives = first
                if arrives:
                    self.ends[host] = self.now
                    self.sources.complete(host, ("host", host))
                else:
                    self.sources.fail(host)
            self._assign()
        return max(end for host, end in self.ends.items() if host not in self.seconds)

    def _assign(self) -> None:
        for host, address, within_s in self.sources.assign():
            assert isinstance(host, int)
            source = -1 if address is None else address[1]
            self.sent[source] += 1
            takes = max(self.seconds.get(host, 1.0), self.seconds.get(source, 1.0))
            if source in self.failing:
                self._under_way.append((self.now + 0.1, host, False))
            elif within_s is not None and takes > within_s:
                self._under_way.append((self.now + within_s, host, False))
            else:
                self._under_way.append((self.now + takes, host, True))


@pytest.mark.parametrize(("num_hosts", "seconds"), [(1, 1), (3, 2), (32, 6), (313, 9)])
def test_the_number_of_copies_doubles_and_the_driver_sends_few(num_hosts: int, seconds: int) -> None:
    network = Network(num_hosts)
    assert network.run() == pytest.approx(seconds)
    assert len(network.ends) == num_hosts
    assert network.sent[-1] <= MOST_FROM_DRIVER
    assert max(network.sent.values()) <= seconds


def test_slow_hosts_keep_no_other_waiting() -> None:
    network = Network(32, seconds=dict.fromkeys(range(0, 32, 4), 500.0))
    assert network.run() < 70  # the first is slow, and known to be so only after 25 s
    assert len(network.ends) == 32
    assert network.sent[-1] <= MOST_FROM_DRIVER + 1


def test_slow_hosts_that_come_later_cost_a_few_copies_time() -> None:
    network = Network(32, seconds=dict.fromkeys(range(3, 32, 4), 500.0))
    assert network.run() < 20
    assert len(network.ends) == 32


def test_hosts_that_give_it_to_nobody_are_soon_given_up() -> None:
    network = Network(32, failing=frozenset(range(0, 32, 2)))
    network.run()
    assert len(network.ends) == 32
    assert all(network.sent[host] <= 2 for host in network.failing)


def test_where_no_host_gives_it_to_others_the_driver_sends_all() -> None:
    network = Network(10, failing=frozenset(range(10)))
    network.run()
    assert len(network.ends) == 10


def test_a_host_that_is_gone_is_no_source() -> None:
    now = 0.0
    sources = PayloadSources(1, lambda: now)
    for host in "abc":
        sources.add(host)
    assert [(one.host, one.source) for one in sources.assign()] == [("a", None)]
    sources.complete("a", ("a", 1))
    sources.remove("a")
    sources.remove("b")
    assert [(one.host, one.source) for one in sources.assign()] == [("c", None)]
    sources.remove("c")
    assert not sources.has_waiting
