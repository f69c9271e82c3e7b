"""``lagom.host.workspace``: what a host gives its ranks, and that nothing of it stays."""

from __future__ import annotations

import io
import multiprocessing
import os
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.host import workspace
from lagom.host.workspace import base_dir, host_workspace, pack_files, remove_leftovers
from lagom.plan import plan
from lagom.program.payload import Parcel
from lagom.wire.framing import anonymous_file
from lagom.wire.spec import RunSpec


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder of the test's own, so that no run in progress is touched."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def spec(run_id: str = "abc", **more: Any) -> RunSpec:
    settings: dict[str, Any] = {
        "run_id": run_id,
        "plan": plan(TorchDistributedConfig(), Cluster(launcher="spark", slots=1)),
        "env": {},
        "whole_env": False,
        "cwd": "/nowhere/at/all",
        "sys_path": ("/a", "/b"),
        "argv": ("program",),
        "python": "3.11",
        "token": "",
        "payload_size": 1,
        "payload": b"payload",
    }
    return RunSpec(**settings | more)


def runs() -> list[str]:
    return sorted(path.name for path in base_dir().glob("run-*"))


def test_the_last_one_out_clears_up() -> None:
    with host_workspace(spec()) as first:
        with host_workspace(spec()) as second:
            assert first.host_dir == second.host_dir
            (first.host_dir / "file").write_text("x")
        assert (first.host_dir / "file").exists()
        assert runs() == ["run-abc"]
    assert runs() == []


def test_a_run_in_another_process_keeps_the_folder() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def stay() -> None:
        with host_workspace(spec()):
            theirs.send("in")
            theirs.recv()

    process = context.Process(target=stay)
    process.start()
    assert ours.recv() == "in"
    with host_workspace(spec()) as place:
        pass
    assert place.host_dir.exists()
    ours.send("out")
    process.join()
    assert not place.host_dir.exists()
    for each in (process, ours, theirs):
        each.close()


def test_the_folder_goes_after_an_exception_too() -> None:
    def fail() -> None:
        with host_workspace(spec()):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert runs() == []


def test_what_killed_runs_left_is_swept_and_what_lives_is_not() -> None:
    stale = base_dir() / "run-stale"
    (stale / "files").mkdir(parents=True)
    (stale / ".alive").write_text("")
    (stale / "files" / "big").write_text("x")
    with host_workspace(spec("lives")):
        remove_leftovers()
        assert runs() == ["run-lives"]


def test_a_version_of_lagom_is_swept_a_week_after_its_last_run(monkeypatch: pytest.MonkeyPatch) -> None:
    code, unused = base_dir() / "code-used", base_dir() / "code-unused"
    for path in (code, unused):
        (path / "lagom" / "host").mkdir(parents=True)
    monkeypatch.setattr(workspace, "__file__", str(code / "lagom" / "host" / "workspace.py"))
    with host_workspace(spec()):
        for path in (code, unused):
            os.utime(path, (0, 0))  # neither has begun a run for long
        remove_leftovers()
        assert code.exists()
        assert not unused.exists()
    os.utime(code, (0, 0))
    remove_leftovers()
    assert not code.exists()


def test_what_a_killed_removal_left_is_swept() -> None:
    (base_dir() / "run-half" / "files").mkdir(parents=True)  # its lock went first
    remove_leftovers()
    assert runs() == []


def test_a_folder_that_is_swept_while_it_is_made_is_made_anew() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def sweep_on() -> None:
        while not theirs.poll():
            remove_leftovers()

    process = context.Process(target=sweep_on)
    process.start()
    try:
        for number in range(100):
            with host_workspace(spec(str(number))) as place:
                (place.host_dir / "file").write_text("x")
                assert f"run-{number}" in runs()  # a former one may be there for a moment
    finally:
        ours.send("enough")
        process.join()
        for each in (process, ours, theirs):
            each.close()
    remove_leftovers()
    assert runs() == []


def test_nobody_else_may_enter(own_tmp: Path) -> None:
    with host_workspace(spec()) as place:
        assert place.host_dir.stat().st_mode & 0o077 == 0
        assert base_dir().stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("taken", ["open", "link", "file", "foreign"])
def test_a_base_folder_that_others_can_have_made_is_left_alone(taken: str, own_tmp: Path, tmp_path: Path) -> None:
    """All processes of the user find the other folder that the first one has made."""
    path = own_tmp / f"lagom-{os.getuid()}"
    if taken == "open":
        path.mkdir(mode=0o755)
    elif taken == "link":
        path.symlink_to(tmp_path)
    elif taken == "file":
        path.write_text("")
        path.chmod(0o600)
    elif os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    else:
        path.mkdir(mode=0o700)
        os.chown(path, 12345, 12345)
        (own_tmp / f"{path.name}-0").mkdir(mode=0o700)
        os.chown(own_tmp / f"{path.name}-0", 12345, 12345)
    before = path.lstat()
    with ThreadPoolExecutor(4) as pool:
        (found,) = set(pool.map(lambda _: base_dir(), range(8)))
    assert found.parent == own_tmp
    assert found.name.startswith(f"{path.name}-")
    assert (found.stat().st_uid, found.stat().st_mode & 0o777) == (os.getuid(), 0o700)
    assert path.lstat() == before
    if taken != "open":
        path.rmdir() if taken == "foreign" else path.unlink()
        assert base_dir() == found  # a name that has become free meanwhile is not taken


def test_away_from_the_driver_ranks_stand_in_a_folder_of_the_run_with_the_users_modules() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("mine/__init__.py", "x = 1")
    with host_workspace(spec(modules_zip=stream.getvalue())) as place:
        assert place.scratch
        assert place.cwd.parent == place.host_dir
        assert Path(place.sys_path[0], "mine/__init__.py").read_text() == "x = 1"
        assert os.pread(place.payload_fd, 100, 0) == b"payload"


def test_on_the_drivers_host_ranks_stand_where_the_driver_stands(tmp_path: Path) -> None:
    payload = tmp_path / "payload"
    payload.write_bytes(Parcel([1]).tobytes())
    token = tmp_path / "token"
    token.write_text(f"abc\n{payload}\n")
    with host_workspace(spec(cwd=str(tmp_path), token=str(token), payload=None)) as place:
        assert not place.scratch
        assert place.cwd == tmp_path
        assert place.sys_path == ["/a", "/b"]
        assert os.pread(place.payload_fd, 10_000, 0) == payload.read_bytes()
        assert not pack_files(place, -1)


def test_a_token_of_another_run_is_no_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("another\n/etc/passwd\n")
    with host_workspace(spec(cwd=str(tmp_path), token=str(token))) as place:
        assert place.scratch


def test_a_payload_that_spark_has_broadcast_is_written_once_for_each_host() -> None:
    written: list[str] = []

    def take(path: str) -> None:
        written.append(path)
        Path(path).write_bytes(b"broadcast")

    with (
        host_workspace(spec(payload=None), take_payload=take) as first,
        host_workspace(spec(payload=None), take_payload=take) as second,
    ):
        assert [os.pread(place.payload_fd, 100, 0) for place in (first, second)] == [b"broadcast"] * 2
        assert len(written) == 1


def test_a_payload_that_cannot_be_had_is_an_error_that_says_why() -> None:
    with (
        pytest.raises(ConnectionError, match="cannot reach the driver"),
        host_workspace(spec(payload=None)),
    ):
        pass
    assert runs() == []


def test_files_that_were_written_come_as_a_tar() -> None:
    with host_workspace(spec()) as place:
        (place.cwd / "deep").mkdir()
        (place.cwd / "deep" / "model.pt").write_bytes(b"weights")
        fd = anonymous_file("files")
        assert pack_files(place, fd)
    assert fd is not None
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "rb") as file, tarfile.open(fileobj=file) as tar:
        member = tar.extractfile("./deep/model.pt")
        assert member is not None
        assert member.read() == b"weights"


def test_no_files_are_no_tar() -> None:
    with host_workspace(spec()) as place:
        assert not pack_files(place, -1)


def test_the_file_of_the_payload_is_closed_afterwards() -> None:
    with host_workspace(spec()) as place:
        pass
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(place.payload_fd)


def test_containers_of_one_host_name_are_hosts_of_their_own() -> None:
    with host_workspace(spec("one")) as one, host_workspace(spec("two")) as two, host_workspace(spec("one")) as again:
        assert one.host != two.host
        assert one.host == again.host
