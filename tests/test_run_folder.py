"""``lagom.run_folder`` and ``lagom.digests``: nothing that another user could have put into a run's folder is used."""

from __future__ import annotations

import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from lagom.digests import end_with_digest, ended_digest, parse_record, record_text
from lagom.errors import LagomError
from lagom.run_folder import RunFolder, write_file

OTHER = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")


def exchange(folder: Path, text: str) -> None:
    """Put another folder, with the file ``a``, in the place of ``folder``."""
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    (folder / "a").write_text(text)


def test_a_folder_stays_the_same_when_its_path_leads_to_another(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "new" / "run")
    folder.write("a", "own")
    reference = pickle.loads(pickle.dumps(folder.reference()))
    exchange(folder.path, "other")
    assert not folder.is_in_place()
    for opened in (folder, reference.open()):
        assert opened.read("a") == b"own"
        opened.write("b", "more")
        opened.rename("b", "c")
    folder.close()
    assert sorted(os.listdir(tmp_path / "new" / "moved")) == ["a", "c"]
    assert os.listdir(tmp_path / "new" / "run") == ["a"]
    with pytest.raises(FileNotFoundError, match="is another folder than when the run began"):
        reference.open()


def test_a_new_folder_that_is_exchanged_while_it_is_made_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path.mkdir

    def make(self: Path, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        if self.name == "run":
            monkeypatch.undo()
            exchange(self, "other")

    monkeypatch.setattr(Path, "mkdir", make)
    with pytest.raises(FileExistsError, match="was exchanged"):
        RunFolder.make(tmp_path / "run")
    assert os.listdir(tmp_path / "run") == ["a"]


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_or_a_file_to_which_others_can_write_is_not_acted_on(mode: int, tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "run")
    folder.write("a", "own")
    os.chmod(tmp_path / "run" / "a", mode)
    with pytest.raises(LagomError, match=r"run/a is not this user's alone, so what it holds is not run"):
        folder.read("a", own=True)
    assert folder.read("a") == b"own"
    os.chmod(tmp_path / "run", mode)
    with pytest.raises(LagomError, match="is not this user's alone"):
        RunFolder.open_own(tmp_path / "run")


@as_root
def test_a_folder_or_a_file_of_another_user_is_not_acted_on(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "run")
    folder.write("a", "own")
    os.chown(tmp_path / "run" / "a", OTHER, OTHER)
    with pytest.raises(LagomError, match="is not this user's alone"):
        folder.read("a", own=True)
    os.chown(tmp_path / "run", OTHER, OTHER)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for path in (tmp_path / "run", tmp_path / "link"):
        with pytest.raises(LagomError, match="is not this user's alone"):
            RunFolder.open_own(path)


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "folder", "loop"])
def test_only_plain_files_are_read(kind: str, tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "run")
    (tmp_path / "secret").write_text("secret")
    place = tmp_path / "run" / "a"
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to({"link": tmp_path / "secret", "dangling": tmp_path / "none", "loop": place}[kind])
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
        with pytest.raises(OSError, match=r"no plain file|Too many levels|Is a directory|No such device"):
            folder.open_file("a", flags)
    assert not (tmp_path / "none").exists()
    with pytest.raises(OSError, match=r"Too many levels|Not a directory|No such file"):
        folder.subfolder("a" if kind != "folder" else "b")


def test_what_is_written_replaces_a_link_and_does_not_follow_it(tmp_path: Path) -> None:
    folder = RunFolder.make(tmp_path / "run")
    for name in ("a", "b"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "keys")
    (tmp_path / "keys").write_text("keys")
    folder.write("a", "text")
    write_file(tmp_path / "run" / "b", "text")
    assert [(tmp_path / name).read_text() for name in ("keys", "run/a", "run/b")] == ["keys", "text", "text"]
    assert sorted(folder.names()) == ["a", "b"]


def test_a_device_or_a_fifo_that_the_user_names_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "fifo").read_text()))
    reader.start()
    write_file(tmp_path / "fifo", "text")
    reader.join()
    assert got == ["text"]
    write_file("/dev/null", "text")
    assert not os.path.isfile("/dev/null")


def test_a_fork_leaves_the_descriptor_of_a_folder_alone(tmp_path: Path) -> None:
    """In a rank, which has closed it, the number may be another file's."""
    folder = RunFolder.make(tmp_path / "run")
    child = os.fork()
    if child == 0:
        os.close(folder.fd)
        file = os.open(os.devnull, os.O_RDONLY)
        other = os.dup2(file, folder.fd)
        folder.close()
        os._exit(int(not os.path.exists(f"/proc/self/fd/{other}")))
    assert os.waitpid(child, 0)[1] == 0
    assert folder.names() == []


def test_each_flipped_bit_of_a_record_is_noticed() -> None:
    facts = {"name": "a run", "losses": [0.1, float("nan"), 3], "nested": {"1": None, "é": "\ud83d"}}
    text = record_text(facts, indent=2).encode()
    assert json.dumps(parse_record(text)) == json.dumps(facts)
    assert parse_record(record_text({})) == {}
    assert parse_record(json.dumps(facts)).keys() == facts.keys()  # written by an earlier version, or by hand
    for number in range(len(text) * 8):
        damaged = bytearray(text)
        damaged[number // 8] ^= 1 << number % 8
        try:
            found = parse_record(bytes(damaged))
        except ValueError:
            continue
        assert json.dumps(found) == json.dumps(facts), bytes(damaged)  # white space


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, '{"digest": 1}', b"\xff"])
def test_what_is_no_record_is_a_plain_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_record(text)


def test_a_file_ends_with_the_digest_of_its_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open(path, "w+b", buffering=0) as file:
        file.write(b"x" * 3_000_000)
        end_with_digest(file.fileno(), "0" * 64)
        with pytest.raises(ValueError, match="not those that were written"):
            ended_digest(file.fileno())
    import hashlib

    path.write_bytes(whole := b"contents")
    with open(path, "r+b", buffering=0) as file:
        file.seek(0, os.SEEK_END)
        end_with_digest(file.fileno(), hashlib.sha256(whole).hexdigest())
        assert ended_digest(file.fileno()) == hashlib.sha256(whole).hexdigest()
    written = path.read_bytes()
    for damaged in (written[:-1], written[1:], written + b"\n", b"", written[:40], b"C" + written[1:]):
        path.write_bytes(damaged)
        with open(path, "rb") as file, pytest.raises(ValueError, match="not those that were written"):
            ended_digest(file.fileno())
