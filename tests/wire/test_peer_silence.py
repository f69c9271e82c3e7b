"""``lagom.wire.peer_silence``: a machine that is cut off is silent, and one whose process takes nothing in is not."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time

import pytest

from lagom.wire import client as link_module
from lagom.wire.client import DriverClient, LinkClosed
from lagom.wire.peer_silence import probe_silence, silent_s
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
            longest, deadline = 0.0, time.monotonic() + 7.0
            while time.monotonic() < deadline:
                longest = max(longest, silent_s(ours))
                time.sleep(0.1)
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
            assert longest < 2.0
            assert theirs.recv(10) == b"x" * 10


@pytest.mark.skipif(not hosts.allowed(), reason="no namespaces may be made here")
@pytest.mark.parametrize("waiting", [False, True])
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
                    link.offer({"type": "log", "data": "x"})
                start = time.monotonic()
                assert ended(link, start + 20.0)
                assert time.monotonic() - start > 1.5
                link.close()
            finally:
                process.kill()
