"""Spark with its encryption on: what lagom sends is encrypted or refused; and the secret of a run is nowhere."""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import RankError
from lagom.spark.spark_session import SparkFacts
from lagom.wire.server import DriverServer
from tests.doors import listening

_WORD = "a word that nobody else is to read"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Set the secret of the next run, and return it."""
    known = secrets.token_bytes(32)
    begin = DriverServer.__init__

    def made(self: DriverServer, *args: Any, **more: Any) -> None:
        begin(self, *args, **more)
        self.secret = known

    monkeypatch.setattr(DriverServer, "__init__", made)
    return known


def speaks(large: Any = None) -> Any:
    import torch

    print(_WORD)
    return torch.zeros(3_000_000)


ENCRYPTED = pytest.mark.parametrize(
    "spark",
    ["local[2]", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("encrypted", "encrypted-cluster"))],
    indirect=True,
    scope="session",
)


@pytest.fixture
def encryption(spark: Any) -> Iterator[None]:
    """Have the session say that Spark encrypts; on ``local[2]``, where Spark's own processes exchange nothing."""
    legacy = "spark.sql.legacy.setCommandRejectsSparkCoreConfs"
    if spark.conf.get("spark.authenticate", "false") == "true":
        yield
        return
    settings = {legacy: "false", "spark.authenticate": "true", "spark.network.crypto.enabled": "true"}
    for key, value in settings.items():
        spark.conf.set(key, value)
    yield
    for key in reversed(settings):
        spark.conf.unset(key)


@ENCRYPTED
@pytest.mark.usefixtures("encryption")
def test_the_channel_is_encrypted(spark: Any, tap: bytearray, capfd: pytest.CaptureFixture[str]) -> None:
    config = TorchDistributedConfig(world_size=2, hparams={"large": os.urandom(2 << 20) + _WORD.encode() * 1000})
    result = experiment.lagom(speaks, config)
    assert result.value.numel() == 3_000_000
    assert _WORD in capfd.readouterr().out
    assert len(tap) > 20 << 20  # the results come home
    assert _WORD.encode() not in tap
    assert b"rank" not in tap


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytearray]:
    """All that goes through the driver's address, by way of an address in between that ranks are told."""
    seen, threads, servers = bytearray(), [], []
    sockets: list[socket.socket] = []
    listen = DriverServer.listen

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept(server: socket.socket, address: tuple[str, int]) -> None:
        with server:
            while True:
                try:
                    near, _ = server.accept()
                except OSError:
                    return
                far = socket.create_connection(address)
                sockets.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threads.append(threading.Thread(target=carry, args=pair))
                    threads[-1].start()

    def tapped(self: DriverServer, *args: Any, **more: Any) -> tuple[str, int]:
        address = listen(self, *args, **more)
        servers.append(socket.create_server(("127.0.0.1", 0)))
        threads.append(threading.Thread(target=accept, args=(servers[-1], address)))
        threads[-1].start()
        name: tuple[str, int] = servers[-1].getsockname()
        return name

    monkeypatch.setattr(DriverServer, "listen", tapped)
    yield seen
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(10)
    for one in sockets:
        one.close()


def tells(folder: str) -> None:
    """Keeps what others can see of rank 0, of the process that holds it, and of one that it starts; and fails."""
    import subprocess

    import lagom

    print("told", flush=True)
    if lagom.rank() != 0:
        return
    child = subprocess.Popen(["sleep", "60"])
    for pid in (os.getpid(), os.getppid(), child.pid):
        for name in ("environ", "cmdline"):
            Path(folder, f"{pid}-{name}").write_bytes(Path(f"/proc/{pid}/{name}").read_bytes())
    child.kill()
    child.wait()
    raise ValueError("all is told")


@ENCRYPTED
@pytest.mark.usefixtures("encryption")
def test_the_secret_is_nowhere(
    spark: Any, secret: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    config = TorchDistributedConfig(world_size=2, run_dir=tmp_path / "runs", log="all", hparams={"folder": str(seen)})
    with pytest.raises((ValueError, RankError), match="all is told") as raised:
        experiment.lagom(tells, config)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "result.json", "rank-0.log"} <= {path.name for path in files}
    assert len([path for path in files if path.parent == seen]) == 6
    own = [Path(f"/proc/self/{name}").read_bytes() for name in ("environ", "cmdline")]
    texts = [repr(raised.value), str(raised.value.__cause__), caplog.text, *capfd.readouterr()]
    everything = b"\n".join([*(path.read_bytes() for path in files), *own, *map(str.encode, texts)])
    forms = [secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()]
    # Not compared in the assertion itself: it would print them.
    found = [number for number, form in enumerate(forms) if form in everything]
    assert not found


@pytest.mark.parametrize("spark", ["standalone"], indirect=True)
def test_a_spark_that_encrypts_nothing_and_only_says_so_is_warned_of(
    spark: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SparkFacts, "encrypted", True)
    config = TorchDistributedConfig(world_size=2, hparams={"large": os.urandom(2 << 20)})
    assert experiment.lagom(speaks, config).value.numel() == 3_000_000
    assert "spark.authenticate is not" in caplog.text


def trains_and_looks() -> list[str]:
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    return listening([os.getpid(), os.getppid()])


@pytest.mark.parametrize("spark", ["local[2]"], indirect=True)
def test_no_rank_listens_where_all_are_on_one_host(spark: Any) -> None:
    config = TorchDistributedConfig(world_size=2, launcher="spark", batches="whole")
    assert experiment.lagom(trains_and_looks, config).per_rank == ([], [])
