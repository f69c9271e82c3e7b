"""Other hosts, made of this machine's namespaces: processes, temporary folder and network address of their own."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_ALL_PROTOCOLS = 3
"""Linux's ETH_P_ALL."""
_SO_RCVBUFFORCE = 33


@dataclass(frozen=True)
class Host:
    """A host: a network namespace of this machine."""

    address: str
    command: tuple[str, ...]
    """Put before a command, runs it there."""
    name: str
    """Name of the host's network namespace."""
    link: str
    """Begins a command of ``ip`` that sets its link up or down."""

    def cut_off(self) -> None:
        """Take the host off the network, for good or until ``reconnect``: nothing arrives from it or at it."""
        ip(f"{self.link} down")

    def reconnect(self) -> None:
        """Put the host back on the network."""
        ip(f"{self.link} up")


def allowed() -> bool:
    """Whether this user may make namespaces and network devices here."""
    if os.getuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    name = f"lgt{os.getpid()}"
    made = quiet("ip", "link", "add", name, "type", "bridge")
    quiet("ip", "link", "del", name)
    return made and quiet("unshare", "--pid", "--fork", "--mount", "--net", "--mount-proc", "true")


@contextmanager
def capture(subnet: str) -> Iterator[list[bytes]]:
    """Frames that the first host of ``subnet`` (its "10.213.7") sends and receives; all of them only at the end."""
    seen: list[bytes] = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as link:
        link.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 256 << 20)
        link.bind((f"lg{subnet.rpartition('.')[2]}v0", _ALL_PROTOCOLS))
        over = threading.Event()

        def listen() -> None:
            while select.select([link], [], [], 0.5)[0] or not over.is_set():
                with contextlib.suppress(BlockingIOError):
                    seen.append(link.recv(1 << 17, socket.MSG_DONTWAIT))

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join()


def payload(frame: bytes) -> bytes:
    """Return the TCP data of a frame; nothing if it is of another protocol."""
    size = 14 + 4 * (frame[14] & 15)
    if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_TCP:
        return b""
    end = 14 + int.from_bytes(frame[16:18], "big")
    return frame[size + 4 * (frame[size + 12] >> 4) : end]


def seen_from_here(host: str, pid: int) -> int:
    """Return the id that the process ``pid`` of ``host`` has here."""
    network = Path(f"/run/netns/{host}").stat().st_ino
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            numbers = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:")).split()
            if int(numbers[-1]) == pid and (status.parent / "ns/net").stat().st_ino == network:
                return int(numbers[1])
    raise ProcessLookupError(f"{host} has no process {pid}")


@contextmanager
def network(count: int) -> Iterator[tuple[str, list[Host]]]:
    """``count`` hosts on one bridge; gives this machine's own address there, and the hosts."""
    with ExitStack() as stack:
        number = stack.enter_context(subnet())
        made = [stack.enter_context(_host(number, host)) for host in range(count)]
        yield f"10.213.{number}.1", made


@contextmanager
def subnet() -> Iterator[int]:
    """Make a bridge ``lgb{number}`` with this machine's address on it, and give its number."""
    number = _free_subnet()
    bridge = f"lgb{number}"
    with ExitStack() as stack:
        stack.callback(quiet, "ip", "link", "del", bridge)
        ip(f"address add 10.213.{number}.1/24 dev {bridge}")
        ip(f"link set {bridge} up")
        yield number


def _free_subnet() -> int:
    """Make a bridge ``lgb{number}`` and return its number; two tests, or what a killed one left, never share one."""
    for number in random.SystemRandom().sample(range(250), 250):
        if quiet("ip", "link", "add", f"lgb{number}", "type", "bridge"):
            return number
    raise RuntimeError("250 bridges lgb* are here: remove those that killed tests left, with `ip link del`")


@contextmanager
def _host(number: int, host: int) -> Iterator[Host]:
    name, veth = f"lgh{number}n{host}", f"lg{number}v{host}"
    quiet("ip", "netns", "del", name)  # of a killed test whose bridge is gone
    ip(f"netns add {name}")
    try:
        ip(f"link add {veth} type veth peer name eth0 netns {name}")
        ip(f"link set {veth} master lgb{number} up")
        with entered(name, f"10.213.{number}.{10 + host}", f"link set {veth}") as found:
            yield found
    finally:
        quiet("ip", "netns", "del", name)
        quiet("ip", "link", "del", veth)


@contextmanager
def entered(name: str, address: str, link: str) -> Iterator[Host]:
    """Give the namespace ``name``, whose device is ``eth0``, an address and a temporary folder."""
    ip(f"-n {name} address add {address}/24 dev eth0")
    ip(f"-n {name} link set eth0 up")
    ip(f"-n {name} link set lo up")
    # Not a /tmp of its own: the project and its Python may lie there.
    with tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True) as folder:
        # Java asks for the address of its own host name.
        own = f"echo {address} {name} >{folder}/hosts && mount --bind {folder}/hosts /etc/hosts"
        enter = f'{own} && hostname {name} && export TMPDIR={folder} && exec "$@"'
        unshare = ("unshare", "--pid", "--fork", "--mount", "--uts", "--mount-proc", "--kill-child")
        yield Host(address, ("ip", "netns", "exec", name, *unshare, "sh", "-c", enter, "sh"), name, link)


def ip(arguments: str) -> None:
    """Run ``ip`` with ``arguments``."""
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


def quiet(*command: str) -> bool:
    """Run ``command``, and return whether it succeeded."""
    return subprocess.run(command, check=False, capture_output=True).returncode == 0
