"""``lagom.disk``: files as with one process."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lagom.session.session import Session
from tests.ranks import alone, run_ranks

NAMES = ["a", "b", "old", "old/x", "old/y", "old/deep/z", "new", "new/c", "new/d", "link", "link/x", "../other/o"]


def tree(folder: Path) -> dict[str, Any]:
    """Return the entries of ``folder``: contents of files, targets of links, None for directories."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def prepared(folder: Path) -> Path:
    """A folder as programs find it."""
    (folder / "in" / "old" / "deep").mkdir(parents=True)
    (folder / "other").mkdir()
    for name in ("in/a", "in/old/x", "in/old/y", "in/old/deep/z", "other/o"):
        (folder / name).write_text(f"first {name}\n")
    (folder / "in" / "link").symlink_to("old")
    return folder


def written(name: str, mode: str, text: str) -> int:
    with open(name, mode) as file:
        return file.write(text)


def random_step(rng: random.Random) -> Any:
    name, other = rng.choice(NAMES), rng.choice(NAMES)
    word = str(rng.randrange(1000))
    inside = os.path.realpath(other).startswith(os.path.realpath(name))  # a copy of itself in itself has no end
    steps: list[Callable[[], Any]] = [
        lambda: Path(name).read_text(),
        lambda: Path(name).write_text(word),
        lambda: written(name, "a", word),
        lambda: written(name, "x", word),
        lambda: written(name, "r+", word),
        lambda: os.mkdir(Path(name)),
        lambda: os.makedirs(name, exist_ok=True),
        lambda: os.rmdir(name),
        lambda: os.remove(name),
        lambda: os.rename(name, other),
        lambda: os.replace(Path(name), Path(other)),
        lambda: os.symlink(other, name),
        lambda: os.link(name, other),
        lambda: sorted(os.listdir(name)),
        lambda: sorted((entry.path, entry.is_dir(), entry.is_symlink()) for entry in os.scandir(name)),
        lambda: (os.path.exists(name), os.path.isdir(name), os.path.islink(name), os.path.realpath(name)),
        lambda: os.readlink(name),
        lambda: os.stat(name).st_size if os.path.isfile(name) else None,
        lambda: os.truncate(name, 3),
        lambda: None if os.path.islink(name) else shutil.rmtree(name),
        lambda: shutil.copy(name, other),
        lambda: inside or shutil.copytree(name, other),
        lambda: inside or shutil.move(name, other),
        lambda: sorted(str(path) for path in Path(name).rglob("*")),
        lambda: sorted(Path().glob(f"*/{name}")),
        lambda: os.chmod(name, 0o640),
        lambda: os.access(name, os.R_OK),
    ]
    number = rng.randrange(len(steps))
    try:
        return number, name, other, steps[number]()
    except OSError as error:
        return number, name, other, type(error).__name__, error.errno, error.filename, error.filename2
    except shutil.Error as error:
        return number, name, other, repr(error)


def random_program(seed: int, folder: Path, steps: int) -> list[Any]:
    os.chdir(folder / "in")
    rng = random.Random(seed)
    return [random_step(rng) for _ in range(steps)]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("first", [0, 1, None], ids=["rank 0 is ahead", "rank 0 is behind", "at once"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 8))])
def test_any_calls_give_what_they_give_to_one_process(seed: int, first: int | None, tmp_path: Path) -> None:
    plain, shared = prepared(tmp_path / "plain"), prepared(tmp_path / "shared")
    expected = alone(lambda _: random_program(seed, plain, 150))

    def run(session: Session) -> Any:
        assert session.group is not None
        for turn in (session.rank,) if first is None else (first, 1 - first):
            if session.rank == turn:
                found = random_program(seed, shared, 150)
                view = tree(shared)
            session.group.barrier()
        return found, view

    for rank, (found, view) in enumerate(run_ranks(2, run)):
        text = str(shared)
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert (number, repr(other).replace(text, str(plain))) == (number, repr(one)), f"rank {rank}"
        assert view == tree(plain), rank
    assert tree(shared) == tree(plain)


@pytest.mark.parametrize(
    "first",
    [pytest.param(0, id="rank 0 is ahead", marks=pytest.mark.soak), pytest.param(1, id="rank 0 is behind")],
)
def test_a_folder_with_a_pipe_is_renamed(first: int, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "x").write_text("before")
    os.mkfifo(tmp_path / "old" / "pipe")

    def run(session: Session) -> Any:
        assert session.group is not None
        for turn in (first, 1 - first):
            if session.rank == turn:
                os.chdir(tmp_path)
                os.rename("old", "new")
                Path("new/x").write_text("after")
                found = sorted(os.listdir()), sorted(os.listdir("new")), stat.S_ISFIFO(os.stat("new/pipe").st_mode)
            session.group.barrier()
        return found

    assert run_ranks(2, run) == [(["new"], ["pipe", "x"], True)] * 2
    assert Path(tmp_path, "new", "x").read_text() == "after"


def test_each_rank_makes_a_pipe_of_its_own(tmp_path: Path) -> None:
    def run(session: Session) -> Any:
        os.chdir(tmp_path)
        os.mkfifo("pipe", 0o600)
        os.mknod("file")
        for make in (os.mkfifo, os.mknod):
            with pytest.raises(FileExistsError):
                make(path="pipe")
        with ThreadPoolExecutor(1) as pool:
            read = pool.submit(Path("pipe").read_text)
            Path("pipe").write_text(f"by {session.rank}")
            text = read.result()
        return text, sorted(os.listdir()), stat.S_ISFIFO(os.stat("pipe").st_mode)

    assert run_ranks(3, run) == [(f"by {rank}", ["file", "pipe"], True) for rank in range(3)]
