"""Network interfaces of this host and their addresses."""

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
    """Return the address at which other ranks reach this host.

    It is the address of the interface in GLOO_SOCKET_IFNAME, else that of ``reached_by``, an address or name of this
    host. See Note [Which network].

    Raises:
        PlanError: if this host has no such interface, or the interface has no IPv4 address.
    """
    name = (env.get(_CHOSEN) or os.environ.get(_CHOSEN) or "").partition(",")[0].strip()
    if not name:
        return _address_of_host(reached_by)
    interface_address = address_of(name)
    if interface_address is None:
        there = ", ".join(f"{other} ({address})" for other, address in addresses().items())
        raise PlanError(
            f"{_CHOSEN} is {name!r}, and {socket.gethostname()} has no such network interface with an IPv4 address; "
            f"it has {there or 'none'}"
        )
    return interface_address


def _address_of_host(host: str) -> str:
    """Return the address of ``host``, a name of this host or an address, which is returned as it is.

    If the name has a loopback address, as 127.0.1.1 on Debian, the address of another interface is returned.
    """
    try:
        host_address = socket.gethostbyname(host)
    except OSError:  # also an IPv6 address
        return host
    if host_address == host or not host_address.startswith("127."):
        return host_address
    return next((address for address in addresses().values() if not address.startswith("127.")), host_address)


def interface_of(ip: str) -> str | None:
    """Return the name of the interface with the IPv4 address ``ip``, or None if no interface has it."""
    return next((name for name, address in addresses().items() if address == ip), None)


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    found = {name: address_of(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address is not None}


def address_of(name: str) -> str | None:
    """Return the IPv4 address of the interface ``name``; None if it has no address or does not exist."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


# Note [Which network]
#
# A host may be in several networks, some of which do not lead to other hosts. Its name may resolve to an address in any
# of them, and on many machines resolves to 127.0.1.1. So a task's address is the one from which it has reached the
# driver, by the kernel's choice of a route. Only if the task cannot reach the driver, its address is the one that
# Spark's executor uses. If that is a name, as on YARN, it is resolved here: the ranks listen on the address that the
# others are told. If it leads to the loopback interface, the first other interface is taken, as by Spark. If executors
# reach each other by a network that does not lead to the driver, the user sets GLOO_SOCKET_IFNAME to its interface, for
# the executors or in the driver's program. NCCL gets the same interface, unless NCCL_SOCKET_IFNAME is set.
