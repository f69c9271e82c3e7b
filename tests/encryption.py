"""Encrypted connections and stores of ranks, as a run on several hosts has them where Spark encrypts."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from lagom.exchange.sockets.encryption import Connection, Credentials, EncryptedSocket, encrypted
from lagom.exchange.sockets.rank_store import RankStore
from lagom.exchange.sockets.value_client import ValueClient
from lagom.exchange.sockets.value_server import ValueServer
from lagom.wire.tls import contexts_of_ranks, key_and_certificate

KEY = b"known to these ranks"


@functools.cache
def credentials() -> Credentials:
    """Credentials with which ranks encrypt."""
    return Credentials(KEY, *contexts_of_ranks(key_and_certificate()))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection: the one that began it, and the one that accepted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for one in (near, far):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def encrypted_pair() -> tuple[Connection, Connection]:
    """Both ends of an encrypted connection."""
    near, far = tcp_pair()
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(encrypted, far, credentials(), accepts=True)
        pair = encrypted(near, credentials(), accepts=False), later.result()
    assert all(type(one) is EncryptedSocket for one in pair)
    return pair


@contextlib.contextmanager
def encrypted_stores() -> Iterator[tuple[RankStore, RankStore]]:
    """The run's store as rank 0 has it, and as rank 1 does."""
    timeout = timedelta(seconds=30)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    server = ValueServer(listener, [1], credentials(), 30.0)
    client = ValueClient(address, 1, credentials(), 30.0)
    try:
        yield RankStore(server.ask, timeout), RankStore(client.ask, timeout)
    finally:
        client.close()
        server.close()
