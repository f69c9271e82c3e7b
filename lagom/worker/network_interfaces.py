"""Network interfaces of this host: which one has an address, and which address one has."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping

from lagom.errors import PlanError

_SIOCGIFADDR = 0x8915
_CHOSEN = "GLOO_SOCKET_IFNAME"


def own_address(reached_by: str, env: Mapping[str, str]) -> str:
    """This host's address for other ranks: that of the interface which the user names, else ``reached_by``.

    See Note [Which network].

    Raises:
        PlanError: when there is no such interface here, or it has no IPv4 address.
    """
    name = (env.get(_CHOSEN) or os.environ.get(_CHOSEN) or "").partition(",")[0].strip()
    if not name:
        return reached_by
    found = address_of(name)
    if found is None:
        there = ", ".join(f"{other} ({address})" for other, address in addresses().items())
        raise PlanError(
            f"{_CHOSEN} is {name!r}, and {socket.gethostname()} has no such network interface with an IPv4 address; "
            f"it has {there or 'none'}"
        )
    return found


def interface_of(ip: str) -> str | None:
    """The name of the interface that has the IPv4 address ``ip``, or None when that cannot be told."""
    return next((name for name, address in addresses().items() if address == ip), None)


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {name: address_of(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address is not None}


def address_of(name: str) -> str | None:
    """The IPv4 address of the interface, or None when it has none, or is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


# Note [Which network]
#
# A host may have several networks, some of which lead nowhere, and its name may resolve to any of them, to 127.0.1.1
# on many machines. So nothing is resolved: a task's address is the one from which it reached the driver, which the
# kernel's routes have chosen; without a driver in reach it is the one at which Spark's executors serve each other.
# Where executors reach each other by another network than the driver, GLOO_SOCKET_IFNAME, set for the executors or in
# the driver's program, names its interface. NCCL is told the same, unless NCCL_SOCKET_IFNAME is set.
