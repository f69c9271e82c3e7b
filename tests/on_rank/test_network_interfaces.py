"""``lagom.on_rank.network_interfaces``: which of a host's networks other ranks are told of."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lagom.errors import PlanError
from lagom.on_rank.network_interfaces import address_of, addresses, interface_of, own_address
from lagom.wire.server import DriverServer
from tests.integration import hosts

ROOT = Path(__file__).parents[2]


def test_interfaces_and_their_addresses_are_known() -> None:
    assert addresses()["lo"] == address_of("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
    assert address_of("nothing0") is None


def test_the_address_that_reached_the_driver_is_taken_unless_the_user_names_an_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_address("10.1.2.3", {}) == "10.1.2.3"
    assert own_address("10.1.2.3", {"GLOO_SOCKET_IFNAME": "lo,eth0"}) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # of the executor
    assert own_address("10.1.2.3", {}) == "127.0.0.1"
    with pytest.raises(PlanError, match=r"GLOO_SOCKET_IFNAME is 'eth7', and .* it has lo \(127\.0\.0\.1\)"):
        own_address("10.1.2.3", {"GLOO_SOCKET_IFNAME": "eth7"})


def test_a_name_of_the_host_becomes_an_address_that_other_hosts_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    names = {"w1": "10.1.2.3", "debian": "127.0.1.1"}

    def gethostbyname(name: str) -> str:
        if name in names.values():
            return name
        if name not in names:
            raise socket.gaierror
        return names[name]

    monkeypatch.setattr(socket, "gethostbyname", gethostbyname)
    others = [address for address in addresses().values() if not address.startswith("127.")]
    assert own_address("w1", {}) == "10.1.2.3"
    assert own_address("debian", {}) == (others[0] if others else "127.0.1.1")
    assert own_address("127.0.1.1", {}) == "127.0.1.1"  # this connection has reached the driver
    assert own_address("fd00::7", {}) == "fd00::7"


PROGRAM = """
import json, os, socket, sys
from lagom.wire.client import dial
from lagom.wire.messages import TaskHello, own_version
from lagom.on_rank.network_interfaces import addresses, interface_of, own_address
link = dial((sys.argv[1], int(sys.argv[2])), bytes.fromhex(sys.argv[3]), TaskHello(task=0, version=own_version()), 5.0)
ip = own_address(link.socket.getsockname()[0], {})
print(json.dumps([ip, interface_of(ip), addresses(), socket.gethostbyname(socket.gethostname())]))
"""


@pytest.fixture
def network() -> Iterator[tuple[str, hosts.Host]]:
    if not hosts.allowed():
        pytest.skip("no namespaces may be made here")
    with hosts.network(1) as (here, made):
        yield here, made[0]


@pytest.mark.parametrize("chosen", [None, pytest.param("eth1", marks=pytest.mark.soak)])
def test_of_two_networks_one_of_which_is_dead_the_living_one_is_taken(
    network: tuple[str, hosts.Host], chosen: str | None
) -> None:
    """The host's name resolves to the dead one's address, as 127.0.1.1 does elsewhere."""
    here, host = network
    name = host.command[3]
    dead = "10.214.7.7"
    setup = (f"-n {name} link add eth1 type veth peer name nowhere", f"-n {name} address add {dead}/24 dev eth1")
    for arguments in (*setup, f"-n {name} link set eth1 up"):
        subprocess.run(["ip", *arguments.split()], check=True)
    resolves = ("sh", "-c", f'echo {dead} {name} >/etc/hosts && exec "$@"', "sh")
    with ExitStack() as stack:
        channel = stack.enter_context(DriverServer(lambda *_: None, lambda _: None))
        address = channel.listen(here)
        args = [sys.executable, "-c", PROGRAM, *map(str, address), channel.secret.hex()]
        env = os.environ | {"PYTHONPATH": str(ROOT)} | ({"GLOO_SOCKET_IFNAME": chosen} if chosen else {})
        done = subprocess.run(
            [*host.command, *resolves, *args],
            capture_output=True,
            text=True,
            env=env,
            cwd=ROOT,
            timeout=170,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    ip, interface, every, by_name = json.loads(done.stdout)
    assert every == {"lo": "127.0.0.1", "eth0": host.address, "eth1": dead}
    assert by_name == dead
    assert (ip, interface) == ((host.address, "eth0") if chosen is None else (dead, "eth1"))
    assert socket.gethostname() != name
