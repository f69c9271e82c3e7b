"""Measures how the payload of a call reaches many hosts: bytes that the driver sends, and seconds until all have it.

    python -m benchmarks.payload_hosts [--hosts 2 8 32] [--megabytes 100] [--mbit 1000]

The hosts are network namespaces of this machine, joined by a bridge, so the benchmark needs root; each is a process
that prepares a run as the host process of a Spark task does. The driver's link and that of each host send at most
``--mbit`` (``tc tbf``). "driver" is what lagom did before: each host takes its own copy from the driver.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.host.workspace import host_workspace
from lagom.plan import plan
from lagom.wire.server import DriverServer, anonymous_file
from lagom.wire.spec import RunSpec
from tests.integration.hosts import Host, allowed, network


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each number of hosts and each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--mbit", type=int, default=1000)
    args = parser.parse_args(argv)
    if not allowed():
        print("this user may not make network namespaces here")
        return 1
    print(f"{args.megabytes} MB, links of {args.mbit} Mbit/s")
    print("hosts way     driver sends, MB  copies  all have it after, s")
    for num_hosts in args.hosts:
        for way in ("driver", "hosts"):
            sent, seconds = _measure(num_hosts, args.megabytes * 1_000_000, args.mbit, passes_on=way == "hosts")
            copies = sent / (args.megabytes * 1e6)
            print(f"{num_hosts:5} {way:7} {sent / 1e6:16.0f} {copies:7.1f} {seconds:22.2f}", flush=True)
    return 0


def _measure(num_hosts: int, size: int, mbit: int, *, passes_on: bool) -> tuple[int, float]:
    """Return the bytes that the driver has sent, and the seconds until the last host has the payload."""
    with contextlib.ExitStack() as stack:
        address, hosts = stack.enter_context(network(num_hosts))
        bridge = f"lgb{address.split('.')[2]}"
        for device in (bridge, *(f"{host.name}/eth0" for host in hosts)):
            _limit(device, mbit)
        fd = anonymous_file("payload")
        stack.callback(os.close, fd)
        digest = hashlib.sha256()
        for _ in range(size // 1_000_000):
            block = os.urandom(1_000_000)
            digest.update(block)
            os.write(fd, block)
        driver = stack.enter_context(DriverServer(lambda *_: None, lambda _: None, fd))
        port = driver.listen(address, num_hosts)[1]
        settings = [address, port, driver.secret.hex(), size, digest.hexdigest(), passes_on]
        running = [_start(host, settings) for host in hosts]
        for one in running:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        before, start = _sent(bridge), time.monotonic()
        for one in running:
            _tell(one)
        for one in running:
            assert one.stdout is not None
            assert one.stdout.readline() == "done\n"
        sent, seconds = _sent(bridge) - before, time.monotonic() - start
        for one in running:
            _tell(one)
            one.wait()
        return sent, seconds


def _start(host: Host, settings: Sequence[object]) -> subprocess.Popen[str]:
    command = [*host.command, sys.executable, "-m", "benchmarks.payload_hosts", json.dumps(settings)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _tell(one: subprocess.Popen[str]) -> None:
    assert one.stdin is not None
    one.stdin.write("go\n")
    one.stdin.flush()


def _limit(device: str, mbit: int) -> None:
    """Limit ``device``, given as "namespace/name" or a name, to ``mbit`` megabits sent per second."""
    space, _, name = device.rpartition("/")
    shaper = f"tc qdisc replace dev {name} root tbf rate {mbit}mbit burst 256kb latency 100ms"
    subprocess.run([*(["ip", "netns", "exec", space] if space else []), *shaper.split()], check=True)


def _sent(bridge: str) -> int:
    return int(Path(f"/sys/class/net/{bridge}/statistics/tx_bytes").read_text())


def run_host(address: str, port: int, secret: str, size: int, sha256: str, passes_on: bool) -> None:
    """Prepare the run on one host at a first line on stdin, and end at a second one."""
    spec = RunSpec(
        run_id="benchmark",
        plan=plan(TorchDistributedConfig(), Cluster(launcher="spark", slots=1)),
        env={},
        whole_env=False,
        cwd="/nowhere",
        sys_path=(),
        argv=(),
        python="",
        token="",
        payload_size=size,
        payload_sha256=sha256,
        passes_payload_on=passes_on,
        address=(address, port),
        secret=bytes.fromhex(secret),
    )
    print("ready", flush=True)
    sys.stdin.readline()
    with host_workspace(spec):
        print("done", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        run_host(*json.loads(sys.argv[1]))
    else:
        sys.exit(main())
