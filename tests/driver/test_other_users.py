"""Another user of this machine, made by ``useradd``, cannot run code as the user of lagom, nor read, write or stop it.

Each test is a soak test: tests/test_run_folder.py and test_damaged_snapshots.py have the same by default, with folders
that are given away; tests/exchange/test_encryption.py has the forwarders, as the same user.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import lagom
from lagom import cli, experiment
from lagom.config import TorchDistributedConfig
from lagom.driver.local import server
from lagom.errors import LagomError
from lagom.exchange.sockets.connect import accepted, reach
from lagom.exchange.sockets.encryption import Credentials
from lagom.exchange.sockets.handshake import End, Misdirected
from lagom.on_rank.resource_usage import children
from lagom.run_folder import RunFolder
from lagom.watch.run_dir import RunRecords
from tests.encryption import KEY, credentials

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.getuid() != 0 or not shutil.which("useradd"), reason="only root can add a user"),
]
ROOT = Path(__file__).parents[2]
_FOLDER = """
import json, os, pickle, sys
class Evil:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[2]}",)
def fill(folder):
    os.makedirs(f"{folder}/snapshots")
    words = ["lagom", "search", "--space", "a=1,2", "--metric", "loss", "--trials", "1", f"{folder}/evil.py"]
    with open(f"{folder}/run.json", "w") as file:
        json.dump({"name": "evil", "driver": {"argv": words, "cwd": folder}}, file)
    with open(f"{folder}/evil.py", "w") as file:
        file.write(f"import os\\nos.system('touch {sys.argv[2]}')\\nprint('loss: 1')")
    with open(f"{folder}/trials.jsonl", "w"):
        pass
    for name in ("call", "settings", "result", "snapshot-000001.state", "snapshot-000999.state"):
        with open(f"{folder}/snapshots/{name}", "wb") as file:
            pickle.dump(Evil(), file)
    for name in ("snapshot-000001.json", "snapshot-000999.json"):
        with open(f"{folder}/snapshots/{name}", "w") as file:
            size = os.path.getsize(f"{folder}/snapshots/{name[:-5]}.state")
            json.dump({"bytes": size, "at": 1e12, "place": [2, 3], "lengths": {}, "world_size": 2}, file)
    os.chmod(folder, 0o777)
folder = sys.argv[1]
"""
"""Beginning of a program of the other user; its arguments are a folder, and a file that shows that its code has run."""


@dataclass(frozen=True)
class OtherUser:
    """A user of this machine."""

    name: str
    uid: int
    top: Path
    """Folder of root's, to whose group the user belongs."""

    @property
    def mark(self) -> Path:
        """The file that the user's code makes, where it runs as somebody else."""
        return self.top / "evil-has-run"

    def start(self, code: str, folder: Path) -> subprocess.Popen[str]:
        """Start a program as the user."""
        command = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups", "/usr/bin/python3", "-c"]
        arguments = [os.fspath(folder), os.fspath(self.mark)]
        return subprocess.Popen([*command, _FOLDER + code, *arguments], text=True, cwd="/", stdout=subprocess.PIPE)

    def run(self, code: str, folder: Path) -> None:
        """Run a program as the user."""
        process = self.start(code, folder)
        process.communicate()
        assert process.returncode == 0


@pytest.fixture
def other() -> Iterator[OtherUser]:
    """A new user, and a folder to which both users can write."""
    name = f"lagom{secrets.token_hex(3)}"
    subprocess.run(["useradd", "--no-create-home", "--user-group", name], check=True)
    try:
        uid = int(subprocess.run(["id", "-u", name], check=True, capture_output=True, text=True).stdout)
        top = Path(tempfile.mkdtemp(prefix="lagom-shared-"))
        (top / "runs").mkdir()
        for folder in (top, top / "runs"):
            os.chown(folder, 0, uid)
            folder.chmod(0o2775)
        yield OtherUser(name, uid, top)
        shutil.rmtree(top)
    finally:
        subprocess.run(["userdel", name], check=True)


def test_nothing_in_a_folder_of_another_user_is_run(
    other: OtherUser, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    folder = other.top / "runs" / "20260101-000000-evil-abcdef"
    other.run("fill(folder)", folder)
    for words in (["search", "--resume", str(folder)], ["resume", str(folder)]):
        assert cli.main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{folder} is not this user's alone, so what it holds is not run" in line
    (folder / "trials.jsonl").unlink()
    with pytest.raises(LagomError, match="is not this user's alone"):
        experiment.resume(folder)
    assert cli.main(["runs", str(other.top / "runs")]) == 0
    assert "evil" in capsys.readouterr().out
    assert not other.mark.exists()


def test_a_report_is_not_written_through_a_link_of_another_user(
    other: OtherUser, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = tmp_path / "authorized_keys"
    keys.write_text("keys")
    folder = other.top / "runs" / "20260101-000000-evil-abcdef"
    other.run(f"fill(folder); os.symlink({str(keys)!r}, f'{{folder}}/report.html')", folder)
    own = other.top / "runs" / "20260101-000000-own-abcdef"
    own.mkdir()
    records = RunRecords(own, {"name": "own"})
    records.close()
    own.chmod(0o777)
    other.run(f"os.symlink({str(keys)!r}, f'{{folder}}/report.html')", own)
    for run in (folder, own):
        assert cli.main(["show", str(run)]) == 0
        page = Path(capsys.readouterr().out.strip())
        assert page.parent != run
        assert "lagom: " in page.read_text()
        assert page.stat().st_uid == 0
        shutil.rmtree(page.parent)
    assert keys.read_text() == "keys"
    own.chmod(0o700)
    assert cli.main(["show", str(own)]) == 0
    assert capsys.readouterr().out.strip() == f"{own}/report.html"
    assert keys.read_text() == "keys"


def test_a_fifo_of_another_user_holds_up_nothing(other: OtherUser, capsys: pytest.CaptureFixture[str]) -> None:
    folder = other.top / "runs" / "20260101-000000-evil-abcdef"
    make = "os.mkdir(folder); [os.mkfifo(f'{folder}/{name}') for name in ('run.json', 'result.json', '.alive')]"
    other.run(make, folder)
    assert cli.main(["runs", str(other.top / "runs")]) == 0
    assert "run.json is damaged: " in capsys.readouterr().out
    for words in (["show", str(folder)], ["compare", str(folder), str(folder)], ["search", "--resume", str(folder)]):
        assert cli.main(words) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_no_moment_between_a_check_and_a_use_is_of_use_to_another_user(other: OtherUser) -> None:
    """The other user exchanges the folder all the time, for a folder and for a link."""
    run = other.top / "runs" / "run"
    folder = RunFolder.make(run)
    folder.write("run.json", "own")
    swap = """
os.makedirs(f"{folder}-evil", exist_ok=True)
with open(f"{folder}-evil/run.json", "w") as file:
    file.write("evil")
os.symlink(f"{folder}-evil", f"{folder}-link")
while True:
    for kind in ("evil", "link"):
        os.rename(folder, f"{folder}-own")
        os.rename(f"{folder}-{kind}", folder)
        os.rename(folder, f"{folder}-{kind}")
        os.rename(f"{folder}-own", folder)
"""
    process = other.start(swap, run)
    found = {"own": 0, "evil": 0, "refused": 0, "missing": 0}
    try:
        end = time.monotonic() + 60
        while sum(found.values()) < 20_000 and time.monotonic() < end:
            found[read_own(run)] += 1
    finally:
        process.kill()
        process.communicate()
    assert found["evil"] == 0
    assert found["own"] > 100
    assert found["refused"] > 100


def read_own(run: Path) -> str:
    """What a process reads that acts on the folder ``run``, or why it reads nothing."""
    try:
        opened = RunFolder.open_own(run)
        text = opened.read("run.json", own=True).decode()
        opened.close()
    except LagomError:
        return "refused"
    except OSError:
        return "missing"
    return text


@pytest.mark.needs("resume")
@pytest.mark.parametrize("launcher", ["local", "spark"])
def test_a_folder_that_is_exchanged_during_a_run_gives_ranks_nothing_to_run(
    launcher: str, other: OtherUser, tmp_path: Path
) -> None:
    from tests.extensions.resume.kills import wait_for_snapshot
    from tests.extensions.resume.training import config, train

    whole = experiment.lagom(train, config(tmp_path, world_size=2)).value
    (other.top / "slowly").touch()
    code = (
        "import json, sys\nfrom pathlib import Path\nfrom lagom import experiment\n"
        "from lagom.spark.spark_master import start_session\n"
        "from tests.extensions.resume.training import config, train\n"
        f"{'start_session' if launcher == 'spark' else 'print'}('local[2]')\n"
        f"settings = config(Path({str(other.top)!r}), world_size=2, snapshot_every_s=0.1, launcher={launcher!r})\n"
        "value = experiment.lagom(train, settings).value\n"
        "Path(sys.argv[1]).write_text(json.dumps([value['losses'], value['weights']]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "value.json")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_snapshot(other.top)
        (run,) = (other.top / "runs").iterdir()
        other.run("os.rename(folder, folder + '-moved'); fill(folder)", run)
        moved = run.with_name(f"{run.name}-moved")
        (other.top / "slowly").unlink()
        os.kill(json.loads((moved / "run.json").read_text())["ranks"]["1"]["pid"], signal.SIGKILL)
        _, said = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "the run continues from batch" in said, said
    assert json.loads((tmp_path / "value.json").read_text()) == [whole["losses"], whole["weights"]]
    assert not other.mark.exists()
    assert json.loads((moved / "result.json").read_text())["outcome"] == "returned"
    assert {path.name for path in run.iterdir()} == {"run.json", "evil.py", "snapshots", "trials.jsonl"}


def test_a_name_that_another_user_has_taken_in_the_temporary_folder_stops_nobody(
    other: OtherUser, tmp_path: Path
) -> None:
    other.top.chmod(0o1777)
    names = ["lagom-0", *(f"lagom-0-{number}" for number in range(20))]
    other.run(f"[os.mkdir(f'{{folder}}/{{name}}') for name in {names}]", other.top)
    script = tmp_path / "script.py"
    script.write_text("import torch\nprint('done')\n")
    env = {**os.environ, "TMPDIR": str(other.top), "LAGOM_RUN_DIR": "", "HOME": "/nonexistent"}
    command = [sys.executable, "-m", "lagom", "run", "-n", "2", str(script)]
    for _ in range(2):
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    mine = [path for path in other.top.glob("lagom-0*") if path.stat().st_uid == 0]
    assert len(mine) == 1
    for name in names:
        with suppress(FileNotFoundError):
            (other.top / name).rmdir()  # empty: nothing was written there


_FORWARDERS = """
import socket, threading
fronts = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in fronts), flush=True)
near = [one.accept()[0] for one in fronts]
far = [socket.create_connection(("127.0.0.1", port)) for port in (PORTS)]
if PASSES_PROOFS_ON:
    for one, other in zip(near, far):
        one.sendall(other.recv(16, socket.MSG_WAITALL))
        other.sendall(one.recv(72, socket.MSG_WAITALL))
        one.sendall(other.recv(56, socket.MSG_WAITALL))
def relay(source, target):
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
pairs = [pair for one, other in zip(near, reversed(far)) for pair in ((one, other), (other, one))]
threads = [threading.Thread(target=relay, args=pair) for pair in pairs]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
"""Program that gives each of two listeners the connection that is meant for the other one."""


@pytest.mark.parametrize(
    ("known", "passes_proofs_on"),
    [(Credentials(KEY), False), (credentials(), False), (credentials(), True)],
    ids=["in clear", "by TLS", "by TLS after the proofs"],
)
def test_forwarders_of_another_user_that_exchange_connections_are_noticed(
    known: Credentials, passes_proofs_on: bool, other: OtherUser
) -> None:
    ends = [End(rank, "a test", ("here", "there", "there")) for rank in range(3)]
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        admitted = [
            pool.submit(lambda rank=rank: list(accepted([listeners[rank]], {2}, ends[rank], known, 3.0)))  # type: ignore[misc]
            for rank in range(2)
        ]
        ports = ", ".join(str(one.getsockname()[1]) for one in listeners)
        code = _FORWARDERS.replace("PORTS", ports).replace("PASSES_PROOFS_ON", str(passes_proofs_on))
        forwarders = stack.enter_context(other.start(code, other.top))
        stack.callback(forwarders.kill)
        assert forwarders.stdout is not None
        fronts = [("127.0.0.1", int(port)) for port in forwarders.stdout.readline().split()]
        reached = [pool.submit(reach, fronts[rank], ends[2], rank, known, 10.0) for rank in range(2)]
        for rank, work in enumerate(reached):
            with pytest.raises(Misdirected, match=rf"connected with rank {rank} .*, and rank {1 - rank} answered"):
                work.result()
        for each in admitted:
            with pytest.raises(TimeoutError):
                each.result()


def test_another_user_cannot_stop_or_end_a_process_of_a_run(other: OtherUser, tmp_path: Path) -> None:
    def waits(folder: str) -> int:
        subprocess.run(["touch", f"{folder}/{os.getpid()}"], check=True)
        while not Path(folder, "go").exists():
            time.sleep(0.05)
        return lagom.rank()

    settings = TorchDistributedConfig(launcher="local", world_size=2, run_dir=None, hparams={"folder": str(tmp_path)})
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(experiment.lagom, waits, settings)
        try:
            while len(ranks := [int(path.name) for path in tmp_path.iterdir()]) < 2:
                time.sleep(0.05)
            fork_server = server().process.pid
            hosts = children(fork_server)
            assert sorted(child for host in hosts for child in children(host)) == sorted(ranks)
            processes = [os.getpid(), fork_server, *hosts, *ranks]
            code = f"""
import signal
for pid in {processes}:
    for kind in (signal.SIGSTOP, signal.SIGINT, signal.SIGKILL):
        try:
            os.kill(pid, kind)
        except PermissionError as error:
            print(pid, kind.name, error.strerror)
"""
            said, _ = other.start(code, other.top).communicate()
        finally:
            (tmp_path / "go").touch()
        assert run.result(60).per_rank == (0, 1)
    names = ("SIGSTOP", "SIGINT", "SIGKILL")
    assert said.splitlines() == [f"{pid} {name} Operation not permitted" for pid in processes for name in names]
