"""Measures the processor time that heartbeats of a thousand ranks, one a second each, take on the driver.

    python -m benchmarks.channel [--ranks 1000] [--seconds 10] [--encrypted]

The ranks are connections from one other process over loopback. They authenticate, join and send heartbeats as real
ranks do. The driver is the driver of a real run, with its event loop, its line of progress and the folder of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.driver.run import RunView
from lagom.plan import plan
from lagom.watch.run_dir import RunRecords, records
from lagom.wire.client import DriverClient, dial
from lagom.wire.messages import Done, Join, Peers, ProgressReport, TaskHello, own_version
from lagom.wire.tls import certificate_of_a_run

SHARE = 0.10  # of a core


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the driver's load; return 0 if the target holds, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--beat", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.beat:
        beat(("127.0.0.1", int(args.beat[0])), bytes.fromhex(args.beat[1]), args.beat[2], args.ranks, args.seconds)
        return 0
    joined_s, loop, rest, heard = measure(args.ranks, args.seconds, args.encrypted)
    how = "encrypted" if args.encrypted else "in clear"
    print(
        f"{args.ranks} ranks, a heartbeat a second each, {how}; {heard} were heard of {args.ranks * args.seconds:.0f}"
    )
    print(f"  all had joined and knew of each other after   {joined_s:6.2f} s")
    print(f"  the channel's event loop takes                {loop:6.1%} of a core")
    print(f"  showing and keeping progress takes            {rest:6.1%} of a core")
    held = loop < SHARE and heard >= 0.99 * args.ranks * (args.seconds - 1)
    print(f"{'holds' if held else 'MISSED':7}the event loop takes less than {SHARE:.0%} of a core")
    return 0 if held else 1


def measure(num_ranks: int, seconds: float, encrypted: bool) -> tuple[float, float, float, int]:
    """Run a driver with ``num_ranks`` simulated ranks.

    Returns:
        Seconds until all ranks had joined; share of a core that the event loop uses; share of a core that the thread
        uses that shows and stores progress; number of received heartbeats.
    """
    config = TorchDistributedConfig(world_size=num_ranks)
    the_plan = plan(config, Cluster(launcher="spark", slots=num_ranks), "benchmark")
    tls, certificate = certificate_of_a_run() if encrypted else (None, "")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        kept = records(folder, False, {"name": "benchmark"})
        assert kept is not None
        stack.callback(kept.close)
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        run = stack.enter_context(RunView(the_plan, "nowhere", can_gather=False, records=kept))
        _, port = run.channel.listen("127.0.0.1", num_ranks, tls)
        beats = [str(port), run.channel.secret.hex(), certificate]
        command = [sys.executable, "-m", "benchmarks.channel", "--ranks", str(num_ranks), "--seconds", str(seconds)]
        began = time.monotonic()
        process = stack.enter_context(
            subprocess.Popen([*command, "--beat", *beats], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        watcher = threading.Thread(target=run.watch)
        watcher.start()
        stack.callback(watcher.join)
        assert process.stdout is not None
        assert process.stdout.readline() == b"joined\n"
        joined_s = time.monotonic() - began
        loop, rest = _shares(run, watcher, process)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        heard = _heard(kept)
    return joined_s, loop, rest, heard


def _shares(run: RunView, watcher: threading.Thread, process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Return the shares of a core that the event loop and the watching thread take until the last heartbeat."""
    clocks = [time.pthread_getcpuclockid(thread.ident or 0) for thread in (run.channel._thread, watcher)]
    before, began = [time.clock_gettime(clock) for clock in clocks], time.monotonic()
    assert process.stdout is not None
    assert process.stdout.readline() == b"beaten\n"
    passed = time.monotonic() - began
    loop, rest = (time.clock_gettime(clock) - start for clock, start in zip(clocks, before, strict=True))
    return loop / passed, rest / passed


def _heard(kept: RunRecords) -> int:
    return len(Path(kept.folder, "progress.jsonl").read_text().splitlines())


def beat(address: tuple[str, int], secret: bytes, certificate: str, num_ranks: int, seconds: float) -> None:
    """Simulate the ranks: each one joins, sends a heartbeat per second (spread over the second), and ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    links = [_joined(address, secret, certificate, rank) for rank in range(num_ranks)]
    for link in links:
        message = link.receive(60.0)
        assert message is not None
        assert isinstance(message, Peers)
    print("joined", flush=True)
    began = time.monotonic()
    for turn in range(int(seconds)):
        for rank, link in enumerate(links):
            time.sleep(max(0.0, began + turn + rank / num_ranks - time.monotonic()))
            link.offer(_beat(rank, turn))
    print("beaten", flush=True)
    sys.stdin.readline()  # wait, so that nothing happens while the driver reads its clocks
    for link in links:
        link.send(Done(reports=[]))


def _joined(address: tuple[str, int], secret: bytes, certificate: str, rank: int) -> DriverClient:
    link = dial(address, secret, TaskHello(task=rank, version=own_version()), 10.0, certificate)
    assert link is not None, f"rank {rank} was not let in"
    link.send(
        Join(
            task=rank,
            pid=rank,
            ranks=[rank],
            host=f"host-{rank % 100}",
            ip="10.0.0.1",
            store=("10.0.0.1", 1),
            python="3.11",
            torch="2.13.0",
            gpus=[],
            cores=1,
        )
    )
    return link


def _beat(rank: int, turn: int) -> ProgressReport:
    """Return a heartbeat with the fields that a real rank sends."""
    step = 100 * turn + 7
    return ProgressReport(
        rank=rank,
        epoch=3,
        step=step,
        steps=10_000,
        samples=step * 64,
        ticks=step * 3,
        loss=0.123456,
        rate=6400.0,
        steps_s=100.0,
        data=0.01,
        waits=0.02,
        waits_for={"1": 0.012},
        memory=1 << 30,
    )


if __name__ == "__main__":
    sys.exit(main())
