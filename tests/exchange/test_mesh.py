"""``lagom.exchange.sockets.mesh`` and ``meeting``: messages over connections of our own."""

from __future__ import annotations

import gc
import os
import socket
from typing import Any

import pytest

from lagom.exchange.sockets import connect
from lagom.exchange.sockets.mesh import Mesh
from lagom.session.session import Session
from tests.encryption import credentials
from tests.ranks import CREDENTIALS, run_ranks


def of_what(text: bytes) -> set[int]:
    """Return the bytes that ``text`` consists of; equal ones, of which there are millions, are compared at once."""
    return set(text[:1] if text == text[:1] * len(text) else text)


def exchanged(session: Session) -> Any:
    group = session.group
    assert group is not None
    found = []
    # 3 MB both ways: more than the kernel holds.
    for size in (0, 5, 3_000_000, 1):
        body = bytes([session.rank]) * (size * (session.rank + 1))
        rows = [bytes(row) for row in group.exchange(b"head", memoryview(body))]
        rows[session.rank] += body
        found.append([(row[:4], len(row), of_what(row[4:])) for row in rows])
    (mesh,) = (one for one in gc.get_objects() if type(one) is Mesh)
    families = {peer.family for peer in mesh.peers if peer is not None}
    in_clear = {peer.family for peer in mesh.peers if type(peer) is socket.socket}
    assert socket.AF_INET not in in_clear or not group.credentials.encrypt
    return found, families


@pytest.mark.parametrize(  # of 2 hosts, one has two ranks; the next test has messages in clear
    ("hosts", "encrypts"),
    [*(pytest.param(one, False, marks=pytest.mark.soak) for one in (1, 2, 3)), (2, True)],
)
def test_messages_of_any_lengths_reach_all_also_between_hosts(
    hosts: int, encrypts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(session: Session) -> Any:
        monkeypatch.setattr(connect, "host_identity", lambda: f"host {session.rank % hosts}".encode())
        if hosts == 2:  # a program may have more files open than select knows numbers of
            held = [os.dup(2) for _ in range(1100)]
            assert max(held) > 1024
        return exchanged(session)

    expected = [
        [(b"head", 4 + size * (rank + 1), {rank} if size else set()) for rank in range(3)]
        for size in (0, 5, 3_000_000, 1)
    ]
    known = credentials() if encrypts else CREDENTIALS
    for rank, (found, families) in enumerate(run_ranks(3, run, collectives="gloo", credentials=known)):
        assert found == expected
        near = any(other % hosts == rank % hosts for other in range(3) if other != rank)
        far = any(other % hosts != rank % hosts for other in range(3))
        assert (socket.AF_UNIX in families, socket.AF_INET in families) == (near, far)


@pytest.mark.parametrize("said", [b"", b"x" * 100])
def test_ranks_meet_past_strangers_who_came_first(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = connect.listen

    def run(session: Session) -> Any:
        strangers = []

        def besieged(family: int, address: Any) -> socket.socket:
            found = listen(family, address)
            for _ in range(20):
                strangers.append(socket.socket(family, socket.SOCK_STREAM))
                strangers[-1].connect(found.getsockname())
                strangers[-1].sendall(said)
            return found

        monkeypatch.setattr(connect, "listen", besieged)
        monkeypatch.setattr(connect, "host_identity", lambda: f"host {session.rank}".encode())
        assert session.group is not None
        return [bytes(row) for row in session.group.exchange(bytes([session.rank]))], len(strangers)

    assert run_ranks(3, run, patches=False, collectives="gloo") == [([b"\0", b"\1", b"\2"], 40)] * 3


def test_a_rank_that_hung_up_or_does_not_answer_is_a_collective_error() -> None:
    ours, theirs = socket.socketpair()
    mesh = Mesh([None, ours], timeout_s=1)
    with pytest.raises(TimeoutError, match="did not answer in time"):
        mesh.exchange(b"x")
    theirs.close()
    with pytest.raises(BrokenPipeError):
        mesh.exchange(b"x")
    mesh.close()


def test_a_process_forked_from_a_rank_does_not_hold_its_connections() -> None:
    ours, theirs = socket.socketpair()
    mesh = Mesh([None, ours], timeout_s=60)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the test is over
        os._exit(0)
    os.close(reading)
    mesh.close()
    assert theirs.recv(1) == b""
    os.close(writing)
    os.waitpid(child, 0)
    theirs.close()
