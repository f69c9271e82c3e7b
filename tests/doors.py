"""Lists the addresses at which processes of this machine listen, from the kernel."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_LISTENS = "0A"
_ACCEPTS = 0x10000


def listening(pids: Iterable[int]) -> list[str]:
    """Addresses at which any of these processes listens: TCP's as "tcp 127.0.0.1:5", Unix sockets' as "unix @name"."""
    found = []
    for pid in pids:
        held = _sockets(pid)
        for family in ("tcp", "tcp6"):
            for row in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == _LISTENS and fields[9] in held:
                    found.append(f"{family} {_address(fields[1])}")
        for row in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
            fields = row.split()
            if int(fields[3], 16) & _ACCEPTS and fields[6] in held:
                found.append(f"unix {fields[7] if len(fields) > 7 else ''}")
    return sorted(set(found))


def listening_in(pid: int) -> list[int]:
    """TCP ports at which any process of the network of ``pid`` listens."""
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(fields[1].partition(":")[2], 16) for fields in rows if fields[3] == _LISTENS]


def _sockets(pid: int) -> set[str]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    return found


def _address(text: str) -> str:
    host, _, port = text.partition(":")
    if len(host) == 8:
        host = socket.inet_ntoa(int(host, 16).to_bytes(4, "little"))
    return f"{host}:{int(port, 16)}"
