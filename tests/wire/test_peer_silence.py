"""``lagom.wire.peer_silence``: a machine that is cut off is silent, and one whose process takes nothing in is not."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import time

import pytest

from lagom.wire import client as link_module
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.messages import Log
from lagom.wire.peer_silence import PeerSilence, probe_silence
from tests.integration import hosts

LISTENER = (
    "import socket, sys, time; s = socket.create_server((sys.argv[1], 7000)); print('here', flush=True); time.sleep(60)"
)


def fill(connection: socket.socket) -> None:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while connection.send(b"x" * 65536):
            pass


def ended(link: DriverClient, deadline: float) -> bool:
    while time.monotonic() < deadline:
        link.give_up_silent()
        try:
            link.poll()
        except LinkClosed:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel is asked")
def test_a_process_that_takes_nothing_in_is_not_a_machine_that_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            probe_silence(ours, 2.0)
            fill(ours)
            silence = PeerSilence(ours)
            longest, deadline = 0.0, time.monotonic() + 7.0
            while time.monotonic() < deadline:
                longest = max(longest, silence.seconds())
                time.sleep(0.1)
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            assert longest < 2.0
            assert theirs.recv(10) == b"x" * 10


class Kernel:
    """A connection whose kernel says of each look whether a probe has no answer, and how old the last answer is."""

    family = socket.AF_INET

    def __init__(self, *looks: tuple[int, float]) -> None:
        self.looks = iter(looks)

    def getsockopt(self, _level: int, _option: int, size: int) -> bytes:
        probes, age_s = next(self.looks)
        return struct.pack("=2x2B48x2I", 0, probes, *[int(1e3 * age_s)] * 2).ljust(size)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel is asked")
@pytest.mark.parametrize(
    ("looks", "seconds"),
    [
        ([(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5)], [0, 1, 2, 3]),  # cut off: a probe each second
        ([(0, 90), (1, 120), (0, 0.9), (0, 1.9)], [0, 1, 0, 0]),  # takes nothing in: a probe on its way
        ([(1, 120), (1, 121), (0, 0.5), (1, 1.5)], [1, 2, 0, 1]),  # takes nothing in, and the network lost one
        ([(1, 120), (1, 0.4), (1, 1.4)], [1, 0.4, 1.4]),  # answered, and asked again, between two looks
    ],
)
def test_silence_counts_from_the_probe_that_has_no_answer(
    looks: list[tuple[int, float]], seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    silence, found = PeerSilence(Kernel(*looks)), []
    for now in range(len(looks)):
        monkeypatch.setattr(time, "monotonic", lambda now=now: 100.0 + now)
        found.append(silence.seconds())
    assert found == pytest.approx(seconds)


@pytest.mark.skipif(not hosts.allowed(), reason="no namespaces may be made here")
@pytest.mark.parametrize("waiting", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_link_to_a_machine_that_is_cut_off_ends(waiting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "LOST_AFTER_S", 3.0)
    with hosts.network(1) as (_, (there,)):
        command = [*there.command, sys.executable, "-c", LISTENER, there.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"here\n"
                connection = socket.create_connection((there.address, 7000))
                probe_silence(connection, 60.0)  # so that it is not the kernel that ends it
                link = DriverClient(connection)
                there.cut_off()
                if waiting:
                    link.offer(Log(rank=0, stream="", data="x"))
                start = time.monotonic()
                assert ended(link, start + 20.0)
                assert time.monotonic() - start > 1.5
                link.close()
            finally:
                process.kill()
