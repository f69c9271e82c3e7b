"""Programs that write files, at 1, 2 and 3 ranks: what they leave and what they read is that of one process."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import gzip
import json
import logging
import multiprocessing
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.tensorboard import SummaryWriter

from lagom import disk as files
from lagom.session.session import Session
from tests.disk.test_rank_disks import tree
from tests.ranks import RankFailedError, alone, lagom_log, run_ranks


def folders() -> Any:
    os.makedirs("out")
    if not os.path.exists("out/plots"):
        os.mkdir("out/plots")
    Path("out", "plots", "one.txt").write_text("1")
    with pytest.raises(FileExistsError) as caught:
        os.makedirs("out")
    return caught.value.filename, sorted(os.listdir("out"))


def replaced_folder() -> Any:
    found = sorted(os.listdir("kept")) if os.path.exists("kept") else []
    shutil.rmtree("kept")
    os.makedirs("kept/inner")
    Path("kept/inner/new.txt").write_text("new")
    return found, [str(path) for path in sorted(Path("kept").rglob("*"))]


def appended_log() -> Any:
    for step in range(3):
        with open("log.csv", "a", newline="") as file:
            csv.writer(file).writerow([step, step * 2])
    return Path("log.csv").read_text()


def read_then_written() -> Any:
    state = json.loads(Path("state.json").read_text())
    state["runs"] += 1
    Path("state.json").write_text(json.dumps(state))
    return json.loads(Path("state.json").read_text())


def atomically_replaced() -> Any:
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
        file.write("whole")
    os.replace(file.name, "state.json")
    with tempfile.NamedTemporaryFile("w", dir=".") as file:
        file.write("gone")
    return Path("state.json").read_text()


def rotated() -> Any:
    for step in range(3):
        if os.path.exists("last.npy"):
            os.rename("last.npy", "before.npy")
        numpy.save("last.npy", numpy.full(3, step))
    return numpy.load("before.npy").tolist(), numpy.load("last.npy", mmap_mode="r").tolist()


def standing_elsewhere() -> Any:
    os.mkdir("run")
    with contextlib.chdir("run") if sys.version_info >= (3, 11) else contextlib.nullcontext():
        Path("here.txt").write_text("here")
        where = os.path.relpath(os.getcwd(), "..")
        return where, sorted(os.listdir()), Path("../state.json").exists()


def logged() -> Any:
    handler = logging.FileHandler("train.log", mode="a")
    logger = logging.getLogger("of the test")
    logger.addHandler(handler)
    logger.warning("an epoch")
    logger.removeHandler(handler)
    handler.close()
    return Path("train.log").read_text()


def bytes_and_descriptors() -> Any:
    os.mkdir(b"bytes")
    fd = os.open(b"bytes/low", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640)
    os.write(fd, b"low")
    os.close(fd)
    folder = os.open("bytes", os.O_RDONLY)
    inner = os.open("low", os.O_RDONLY, dir_fd=folder)
    read = os.read(inner, 10), os.listdir(folder), os.stat("low", dir_fd=folder).st_size
    os.close(inner)
    os.close(folder)
    with pytest.raises(FileExistsError) as caught:
        open("bytes/low", "x")  # noqa: SIM115
    return read, os.listdir(b"bytes"), os.stat("bytes/low").st_mode & 0o777, caught.value.filename


def linked() -> Any:
    os.mkdir("runs")
    Path("runs/1.txt").write_text("first")
    os.symlink("runs", "latest")
    Path("latest/2.txt").write_text("second")
    os.remove("kept/old.txt")
    os.symlink("../state.json", "kept/old.txt")
    return sorted(os.listdir("latest")), Path("kept/old.txt").read_text(), os.path.realpath("latest")[-4:]


def temporary() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x").write_text("x")
        shutil.copy(Path(folder, "x"), "copied")
        shutil.move(str(Path(folder, "x")), "moved")
        shutil.copy("moved", Path(folder, "back"))
        names = os.listdir(folder)
    return names, os.path.exists(folder), Path("moved").read_text()


class Cached(Dataset[str]):
    """A data set that keeps what it computes in files, as workers and the main process read them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        path = Path("cache", f"{index}.txt")
        if not path.exists():
            path.write_text(f"computed {index}")
        return path.read_text()


def cached_by_workers() -> Any:
    os.mkdir("cache")
    context = multiprocessing.get_context("fork")
    loader = DataLoader(Cached(), batch_size=None, num_workers=2, multiprocessing_context=context)
    with torch.no_grad():
        return list(loader), sorted(os.listdir("cache")), [path.read_text() for path in sorted(Path("cache").iterdir())]


def imported() -> Any:
    os.mkdir("generated")
    Path("generated/made_by_the_program.py").write_text("VALUE = 7\n")
    sys.path.insert(0, os.path.abspath("generated"))
    try:
        import made_by_the_program  # type: ignore[import-not-found]  # as the program has just written it

        return made_by_the_program.VALUE
    finally:
        sys.path.pop(0)
        shutil.rmtree("generated/__pycache__", ignore_errors=True)


def in_a_database() -> Any:
    with contextlib.closing(sqlite3.connect("runs.db")) as database:
        database.execute("CREATE TABLE runs (step INTEGER, loss REAL)")
        database.executemany("INSERT INTO runs VALUES (?, ?)", [(step, step / 2) for step in range(50)])
        database.commit()
    with contextlib.closing(sqlite3.connect(os.path.abspath("runs.db"))) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("DELETE FROM runs WHERE step > 20")
        database.commit()
        return database.execute("SELECT count(*), sum(loss) FROM runs").fetchall()


def in_parquet() -> Any:
    table = pyarrow.table({"part": [0, 1, 0, 1], "x": [0.5, 1.5, 2.5, 3.5]})
    os.makedirs("tables", exist_ok=True)
    table.to_pandas().to_parquet("tables/one.parquet")
    pyarrow.parquet.write_table(table, "tables/two.parquet")
    os.replace("tables/two.parquet", "tables/one.parquet")
    Path("kept/old.txt").unlink()  # a folder of before, of which something is gone and to which something comes
    pyarrow.parquet.write_to_dataset(table, "kept", ["part"], basename_template="{i}.parquet")
    pyarrow.csv.write_csv(table, "state.json")
    found = pyarrow.dataset.dataset("kept", partitioning="hive").to_table().to_pandas()
    with pytest.raises(FileNotFoundError):
        pyarrow.parquet.read_table("tables/two.parquet")
    return found["x"].tolist(), pyarrow.parquet.read_table("tables")["x"].to_pylist(), Path("state.json").read_text()


def by_a_library() -> Any:
    """A library that is loaded while the program runs, and knows nothing of Python."""
    zlib = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libz.so" in line)
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(shutil.copy(zlib, folder))
    library.gzopen.restype = ctypes.c_void_p
    for mode, text in ((b"wb", b"one "), (b"ab", b"two "), (b"rb", b"")):
        file = ctypes.c_void_p(library.gzopen(b"log.csv", mode))
        library.gzwrite(file, text, len(text))
        library.gzclose(file)
    return gzip.decompress(Path("log.csv").read_bytes()), library.gzopen(b"no/log.csv", b"wb")


def profiled() -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3).sum()
    profile.export_chrome_trace("state.json")  # C++, which writes another file first and renames it
    events = json.loads(Path("state.json").read_text())["traceEvents"]
    Path("state.json").write_text("")
    return [event["name"] for event in events if event.get("cat") == "cpu_op"], sorted(os.listdir())


def each_function(name: Callable[[str], Any] = str, folder: int | None = None) -> Any:
    """Call functions of ``os`` with arguments by keyword; ``name`` makes a path, which is relative to ``folder``."""
    at: dict[str, Any] = {"dir_fd": folder}
    both: dict[str, Any] = {"src_dir_fd": folder, "dst_dir_fd": folder}
    os.mkdir(path=name("d"), mode=0o750, **at)
    os.close(os.open(path=name("d/a"), flags=os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o640, **at))
    os.rename(src=name("d/a"), dst=name("b"), **both)
    os.replace(src=name("b"), dst=name("d/a"), **both)
    os.link(src=name("d/a"), dst=name("d/hard"), **both)
    os.symlink(src=name("hard"), dst=name("d/soft"), target_is_directory=False, **at)
    os.chmod(path=name("d/soft"), mode=0o604, **at)
    os.utime(path=name("d/soft"), times=(5, 6), **at)
    found = os.stat(path=name("d/hard"), **at)
    is_link = stat.S_ISLNK(os.lstat(path=name("d/soft"), **at).st_mode)
    seen = found.st_mode, found.st_mtime, is_link, os.access(path=name("d/soft"), mode=os.W_OK, **at)
    target = os.readlink(path=name("d/soft"), **at)
    os.unlink(path=name("d/soft"), **at)
    os.remove(path=name("d/hard"), **at)
    with pytest.raises(OSError, match="not empty") as caught:
        os.rmdir(path=name("d"), **at)
    os.remove(path=name("d/a"), **at)
    os.rmdir(path=name("d"), **at)
    return seen, target, caught.value.filename


def functions_by_keyword() -> Any:
    found = [each_function(name) for name in (str, os.fsencode, Path)]
    folder = os.open(path="kept", flags=os.O_RDONLY)
    found.append(each_function(folder=folder))
    os.close(folder)
    os.truncate(path="kept/old.txt", length=2)
    with open(file="state.json", mode="w", encoding="utf-8") as file:
        file.write("new")
    os.mkdir("empty")
    os.chdir(path="empty")
    os.chdir("..")
    return found, os.listdir(path="kept"), [entry.path for entry in os.scandir(path=b"kept")], sorted(os.listdir())


PROGRAMS: list[Callable[[], Any]] = [
    functions_by_keyword,
    in_a_database,
    in_parquet,
    by_a_library,
    profiled,
    folders,
    replaced_folder,
    appended_log,
    read_then_written,
    atomically_replaced,
    rotated,
    standing_elsewhere,
    logged,
    bytes_and_descriptors,
    linked,
    temporary,
    cached_by_workers,
    imported,
]


def found_by_programs(folder: Path) -> Path:
    """A folder with what a run before may have left."""
    (folder / "kept").mkdir(parents=True)
    (folder / "kept" / "old.txt").write_text("old")
    (folder / "state.json").write_text('{"runs": 1}')
    (folder / "log.csv").write_text("from,before\n")
    return folder


def standing_in(folder: Path, program: Callable[[], Any]) -> Any:
    os.chdir(folder)
    return program()


def standing_in_all(folder: Path) -> dict[str, Any]:
    """Run every program in a folder of its own."""
    return {program.__name__: standing_in(folder / program.__name__, program) for program in PROGRAMS}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folders of all programs after a run in one process, and the values that they returned."""
    folder = tmp_path_factory.mktemp("plain")
    for program in PROGRAMS:
        found_by_programs(folder / program.__name__)
    return folder, alone(lambda _: standing_in_all(folder))


@pytest.mark.parametrize(
    ("world_size", "first"),
    [
        # In a world of one nothing is patched, as a test below shows.
        *(pytest.param(*other, marks=pytest.mark.soak) for other in ((1, 0), (2, 0), (2, 1), (3, 0))),
        (3, 2),
    ],
)
def test_files_are_those_of_one_process(
    plain: tuple[Path, dict[str, Any]], world_size: int, first: int, tmp_path: Path
) -> None:
    """Ranks run one after the other, so that each finds the disk as others have left it; rank ``first`` begins."""
    for program in PROGRAMS:
        found_by_programs(tmp_path / program.__name__)

    def in_turn(session: Session, program: Callable[[], Any]) -> Any:
        value = None
        for turn in range(world_size):
            if session.rank == (first + turn) % world_size:
                session.live = False  # it draws no numbers and trains nothing: no collectives
                value = standing_in(tmp_path / program.__name__, program)
                session.live = True
            if session.group is not None:
                session.group.barrier()
        return value

    def run(session: Session) -> dict[str, Any]:
        return {program.__name__: in_turn(session, program) for program in PROGRAMS}

    folder, expected = plain
    assert run_ranks(world_size, run) == [expected] * world_size
    for program in PROGRAMS:
        assert tree(tmp_path / program.__name__) == tree(folder / program.__name__), program.__name__


def resumed(epochs: int) -> Any:
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    begin = 0
    if os.path.exists("checkpoints/last.pt"):
        state = torch.load("checkpoints/last.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["epoch"] + 1
    os.makedirs("checkpoints", exist_ok=True)
    data = torch.utils.data.TensorDataset(torch.arange(36.0, dtype=torch.float64).view(12, 3) / 36)
    for epoch in range(begin, begin + epochs):
        for (x,) in DataLoader(data, batch_size=4):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state, "checkpoints/last.pt")
        torch.save(model, f"checkpoints/{epoch}.pt")
    return begin, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.soak  # tests/programs/resumed.py does so by default
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_checkpoint_of_the_program_resumes_it(world_size: int, tmp_path: Path) -> None:
    plain, shared = tmp_path / "plain", tmp_path / "shared"
    for folder in (plain, shared):
        folder.mkdir()
    for begin in (0, 2):
        expected = alone(lambda _: standing_in(plain, lambda: resumed(2)))
        for found in run_ranks(world_size, lambda _: standing_in(shared, lambda: resumed(2))):
            assert (found[0], expected[0]) == (begin, begin)
            assert found[1] == (expected[1] if world_size == 1 else pytest.approx(expected[1], abs=1e-12))
    assert tree(shared).keys() == tree(plain).keys()
    if world_size == 1:
        assert tree(shared) == tree(plain)


def test_the_events_of_tensorboard_are_written_once(tmp_path: Path) -> None:
    """The names of its files hold the time and the number of the process, so every rank has one of its own."""

    def run(session: Session) -> Any:
        session_rank = session.rank
        os.chdir(tmp_path)
        files.asked_for_rank()
        with SummaryWriter("runs/one") as writer:
            for step in range(3):
                writer.add_scalar("loss", session_rank + step, step)
        return len(os.listdir("runs/one"))

    assert run_ranks(3, run) == [1, 1, 1]
    assert len(os.listdir(tmp_path / "runs" / "one")) == 1


@pytest.mark.soak  # tests/driver/test_local_files.py shows it by default
def test_files_of_one_rank_on_purpose_survive_it(tmp_path: Path) -> None:
    def run(session: Session) -> Any:
        os.chdir(tmp_path)
        files.asked_for_rank()
        Path("common.txt").write_text(f"by {session.rank}")
        Path(f"own-{session.rank}.txt").write_text(f"by {session.rank}")
        if session.rank == 2:
            os.makedirs("only/here")
            Path("only/here/x").write_text("by 2")
            raise RuntimeError("after writing")
        return os.listdir()

    with pytest.raises(RankFailedError, match="after writing"):
        run_ranks(3, run)
    own = {f"own-{rank}.txt": f"by {rank}".encode() for rank in range(3)}
    found = tree(tmp_path)
    assert found == {"common.txt": b"by 0", "only": None, "only/here": None, "only/here/x": b"by 2"} | own


def test_files_of_other_ranks_are_dropped_when_the_program_does_not_know_its_rank(tmp_path: Path) -> None:
    def run(session: Session) -> None:
        (tmp_path / f"{session.rank}.txt").write_text("by accident, as names of a process or a moment are")

    run_ranks(2, run)
    assert list(tree(tmp_path)) == ["0.txt"]


def test_files_of_a_failing_run_are_rank_0s(tmp_path: Path) -> None:
    def run(session: Session) -> None:
        os.chdir(tmp_path)
        with open("log.txt", "a") as file:
            for step in range(100):
                file.write(f"{step}\n")
                file.flush()
                if step == 5:
                    raise RuntimeError("in the middle")

    with pytest.raises(RankFailedError, match="in the middle"):
        run_ranks(2, run)
    assert (tmp_path / "log.txt").read_text() == "0\n1\n2\n3\n4\n5\n"


def test_nothing_is_patched_in_a_world_of_one(tmp_path: Path) -> None:
    functions = open, os.stat, os.mkdir, os.listdir

    def run(_: Session) -> bool:
        return (open, os.stat, os.mkdir, os.listdir) == functions

    assert run_ranks(1, run) == [True]
    assert run_ranks(2, run) == [False, False]


def test_programs_that_a_library_outside_of_this_python_starts_are_not_told_of(tmp_path: Path) -> None:
    """MLflow's Git on a PYTHONPATH runs `git version`."""
    library = tmp_path / "site-packages" / "tool.py"
    library.parent.mkdir()
    library.write_text("import subprocess\ndef run():\n    subprocess.run(['true'], check=True)\n")
    own = tmp_path / "own.py"
    own.write_text(library.read_text())

    def run(_: Session) -> list[str]:
        said = lagom_log()
        counts = []
        for path in (library, own):
            variables: dict[str, Any] = {}
            exec(compile(path.read_text(), str(path), "exec"), variables)
            variables["run"]()
            counts.append(len(said))
        return list(map(str, counts))

    assert run_ranks(2, run) == [["0", "1"], ["0", "0"]]


@pytest.mark.parametrize("knows", [False, True])
def test_a_program_that_every_rank_starts_is_told_of_once(knows: bool, tmp_path: Path) -> None:
    def run(session: Session) -> list[str]:
        os.chdir(tmp_path)
        said = lagom_log()
        if knows:
            files.asked_for_rank()
        os.system("true")
        for _ in range(2):
            subprocess.run(["touch", f"{session.rank} here"], check=True)
        return said

    first, second = run_ranks(2, run)
    assert second == []
    assert len(first) == (0 if knows else 1)
    assert knows or "every rank runs `true`, and what that writes goes to the real disk" in first[0]
    assert sorted(tree(tmp_path)) == ["0 here", "1 here"]
