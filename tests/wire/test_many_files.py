"""A message arrives whole, and with more files than the kernel takes at once, in their order."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator

import pytest

from lagom.wire.framing import receive_with_files, send_with_files


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM))
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("count", [0, 1, 250, 251, 600])
def test_all_files_arrive_in_order(ends: tuple[socket.socket, socket.socket], count: int) -> None:
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        send_with_files(ends[0], b"a run", [file.fileno() for file in files])
        message, fds = receive_with_files(ends[1])
        for fd in fds:
            stack.callback(os.close, fd)
        assert message == b"a run"
        assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(file.fileno()).st_ino for file in files]


def test_a_sender_that_ends_amid_its_files_has_sent_nothing(ends: tuple[socket.socket, socket.socket]) -> None:
    with tempfile.TemporaryFile() as file, socket.socket() as one:
        socket.send_fds(ends[0], [(3).to_bytes(4, "little")], [file.fileno(), one.fileno()])
        ends[0].close()
        assert receive_with_files(ends[1]) == (b"", [])


def test_a_message_larger_than_any_packet_arrives_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    message = os.urandom(8 << 20)
    send_with_files(ends[0], message, [])
    assert receive_with_files(ends[1]) == (message, [])
