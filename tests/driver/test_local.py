"""``lagom.driver.local``: processes of this machine, as an ordinary call would have it, and how they fail."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import logging
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lagom
from lagom import cluster, experiment
from lagom.config import TorchDistributedConfig
from lagom.control_groups import available_cores
from lagom.driver import local
from lagom.errors import LagomError, PayloadError, RankError, RankTraceback
from lagom.result import Result
from tests.driver.forked_server import forked_server
from tests.driver.huge_megabytes import huge_megabytes
from tests.huge_pages import has_huge_pages

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("rng_untouched")


def run(function: Callable[..., Any], world_size: int = 2, **settings: Any) -> Result:
    config = {"launcher": "local", "max_failures": 0, **settings}
    return experiment.lagom(function, TorchDistributedConfig(world_size=world_size, **config))


@pytest.fixture(autouse=True)
def no_rank_is_left() -> Iterator[None]:
    """Fail a test after which a rank is left; that a further call works is shown by the next one."""
    yield
    assert not ranks_alive()


def works() -> bool:
    """Whether a further call works."""
    return bool(run(lambda: sum(range(lagom.world_size())))["test result"] == 1)


def ranks_alive() -> list[int]:
    """Processes under the fork server, once those that are ending have ended."""
    deadline = time.monotonic() + 30.0
    while (found := _descendants(local.server().process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        children = [child for child in children if Path(f"/proc/{child}/cmdline").read_bytes()]
    except OSError:
        return []
    return children + [below for child in children for below in _descendants(child)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], patience_s: float = 30.0) -> bool:
    deadline = time.monotonic() + patience_s
    while (left := any(map(alive, pids))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


# --- what comes back


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.soak) for size in (1, 3))])
@pytest.mark.parametrize(
    "value",
    [
        *(None, 0.25, {"loss": 0.5, "auc": [1, 2]}, torch.arange(4.0)),
        *(pytest.param(one, marks=pytest.mark.soak) for one in (7, True, "ü", (1, 2), np.arange(3), np.float32(1.5))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_function_returns_is_the_result_with_its_type(value: Any, world_size: int) -> None:
    result = run(lambda: value, world_size)
    found = result["test result"]
    assert type(found) is type(value)
    assert np.array_equal(found, value) if isinstance(value, (np.ndarray, torch.Tensor)) else found == value
    assert result.world_size == world_size


def test_each_ranks_value_stands_in_rank_order() -> None:
    result = run(lambda: lagom.rank() * 10, 3)
    assert result.per_rank == (0, 10, 20)


@pytest.mark.soak  # tests/integration/test_kinds.py has one by default
def test_a_large_result_comes_back_whole_and_writable() -> None:
    result = run(lambda: torch.arange(4_000_000, dtype=torch.float64))
    found = result["test result"]
    assert found.sum().item() == sum(range(4_000_000))
    found.add_(1)


def test_a_lambda_a_method_and_a_partial_can_be_run() -> None:
    import functools

    class Trainer:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        def fit(self, x: int) -> int:
            return self.factor * x

    hparams = {"x": 2}
    assert run(lambda x: x + 1, 1, hparams=hparams).value == 3
    assert run(Trainer(3).fit, 1, hparams=hparams).value == 6
    assert run(functools.partial(lambda a, x: a + x, 5), 1, hparams=hparams).value == 7


def test_data_sets_arrive_as_objects_as_callables_and_as_classes() -> None:
    class Squares(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            return index * index

    def train(train_set: Any, test_set: Any) -> Any:
        return type(train_set).__name__, train_set[2], test_set[3], lagom.world_size()

    expected = ("Squares", 4, 9, 2)
    assert run(train, train_set=Squares(), test_set=Squares()).value == expected
    assert run(train, train_set=lambda: Squares(), test_set=Squares).value == expected

    def maggy(module: Any, dataset: Any, hparams: Any, reporter: Any) -> Any:
        reporter.broadcast(0.5)
        return module(), dataset[0][2], dataset[1], hparams["lr"]

    assert run(maggy, dataset=[Squares, "a string"], module=lambda: 3, hparams={"lr": 1}).value == (3, 4, "a string", 1)


def test_a_data_set_is_one_object_in_both_spellings() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(3))

    def train(train_set: Any, test_set: Any, dataset: Any) -> bool:
        return dataset[0] is train_set and dataset[1] is test_set

    assert run(train, train_set=data, test_set=data).value is True
    assert run(train, train_set=lambda: [1], test_set=lambda: [2]).value is True


# --- what is around the function


def test_inside_there_is_no_sign_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "7")

    def look() -> Any:
        names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
        return sorted(names & set(os.environ)), torch.distributed.is_initialized(), lagom.world_size()

    assert run(look).value == ([], False, 2)
    assert (lagom.rank(), lagom.world_size()) == (0, 1)


def test_the_environment_goes_there_and_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_TEST", "from the driver")

    def look() -> Any:
        os.environ["LAGOM_TEST_RANK"] = "set by a rank"
        return os.environ.get("LAGOM_TEST"), os.environ.get("LAGOM_TEST_GONE")

    monkeypatch.setenv("LAGOM_TEST_GONE", "x")
    assert run(look).value == ("from the driver", "x")
    monkeypatch.delenv("LAGOM_TEST_GONE")
    assert run(look).value == ("from the driver", None)
    assert "LAGOM_TEST_RANK" not in os.environ


def test_the_drivers_command_line_is_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["notebook", "--lr", "0.1"])
    assert run(lambda: list(sys.argv)).per_rank == (["notebook", "--lr", "0.1"],) * 2


def test_relative_files_are_read_from_and_written_to_the_drivers_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("hello")

    def copy() -> str:
        text = Path("in.txt").read_text()
        if lagom.rank() == 0:
            Path("out.txt").write_text(text.upper())
        return os.getcwd()

    assert run(copy).value == str(tmp_path)
    assert Path("out.txt").read_text() == "HELLO"


def test_an_edited_module_is_seen_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def use() -> int:
        return int(importlib.import_module("lagom_edited").answer())

    for answer in (1, 22, 333):
        (tmp_path / "lagom_edited.py").write_text(f"def answer():\n    return {answer}\n")
        assert run(use).value == answer


def test_without_a_seed_the_ranks_go_on_where_this_process_stands_and_it_where_they_end() -> None:
    def draw() -> Any:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    torch_state, numpy_state, random_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        found = []
        for once in (draw, lambda: run(draw).per_rank):
            torch.manual_seed(5)
            np.random.seed(5)
            random.seed(5)
            found.append([once(), draw()])
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(random_state)
    (plain, after), on_ranks = found
    assert on_ranks == [(plain, plain), after]


@pytest.mark.parametrize("seed", [0, pytest.param(7, marks=pytest.mark.soak)])
def test_a_seed_is_what_a_program_sets_by_hand(seed: int) -> None:
    def draw() -> Any:
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    def by_hand() -> Any:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return draw()

    assert run(draw, seed=seed).per_rank == run(by_hand, seed=99).per_rank


def test_the_cores_are_shared_by_the_ranks_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = available_cores()
    assert run(lambda: torch.get_num_threads()).value == max(1, cores // 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run(lambda: torch.get_num_threads()).value == 3


@pytest.mark.skipif(not has_huge_pages(), reason="this system has no huge pages for those who ask")
def test_large_tensors_are_in_huge_pages() -> None:
    for found, seen in run(huge_megabytes).per_rank:
        assert found > 100
        assert seen is None


def test_a_server_that_was_shut_down_or_killed_is_started_again_and_its_ranks_have_what_the_user_has_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks have the user's pages, no input, and none of the driver's files open."""
    path = tmp_path / "secret"

    def look() -> Any:
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return sys.stdin.read(), [target for target in found if target == str(path)], huge_megabytes()

    def kill_server(server: int) -> None:
        if lagom.rank() == 1:
            os.kill(server, signal.SIGKILL)
        time.sleep(1000)

    chosen = "glibc.malloc.hugetlb=0"
    monkeypatch.setenv("GLIBC_TUNABLES", chosen)
    with open(path, "w") as secret:
        os.set_inheritable(secret.fileno(), True)
        local.shut_down()  # so that the server starts while the file is open, and with the variable
        local.shut_down()
        try:
            for text, files, (huge, seen) in run(look).per_rank:
                assert (text, files) == ("", [])
                assert huge <= 100 or not has_huge_pages()
                assert seen == chosen
            with pytest.raises(LagomError, match="gone"):
                run(kill_server, hparams={"server": local.server().process.pid})
        except BaseException:
            local.shut_down()
            raise
    monkeypatch.undo()
    assert works()


# --- what is shown

PRINTS = """
import os, sys, ctypes
from lagom import experiment
from lagom.config import TorchDistributedConfig

def train():
    print("first")
    print("ünïcödé \\N{SNOWMAN}", end="")
    print(" more", file=sys.stdout, flush=True)
    os.write(1, b"straight to the file\\n")
    for step in range(3):
        print(f"\\r{step}/3", end="")
    print()
    ctypes.CDLL(None).printf(b"from C\\n")
    ctypes.CDLL(None).fflush(None)
    sys.stdout.write("x" * 1_000_000 + "\\n")
    sys.stdout.buffer.write(b"bytes\\n") if hasattr(sys.stdout, "buffer") else None
    print("to stderr: \\N{SNOWMAN}", file=sys.stderr)
    print("no newline at the end", end="")

def fail():
    raise ValueError("the message")

def run(function, world_size):
    experiment.lagom(function, TorchDistributedConfig(launcher="local", world_size=world_size))

if len(sys.argv) == 1:
    train()
else:
    for world_size in (1, 2):
        run(train, world_size)
        os.write(1, b"\\0")
    run(fail, 2)
"""


@pytest.mark.soak  # tests/wire/test_many_files.py shows by default that the files arrive
def test_more_ranks_than_one_message_has_files_for() -> None:
    assert run(lambda: lagom.rank(), world_size=300).per_rank == tuple(range(300))


@pytest.mark.soak  # a limit that hundreds of ranks meet
def test_the_driver_needs_one_open_file_for_each_rank() -> None:
    run(lambda: None)  # what the first call opens stays open
    num_ranks, others = 24, 16
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(2) for _ in range(num_ranks + others)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
    try:
        for fd in held:
            os.close(fd)
        assert run(lambda: lagom.rank(), num_ranks).per_rank == tuple(range(num_ranks))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.soak
def test_a_rank_holds_no_more_files_when_there_are_more_ranks() -> None:
    def files() -> int:
        model = torch.nn.Linear(2, 1)
        model(torch.rand(2, 2)).sum().backward()
        return len(os.listdir("/proc/self/fd"))

    few, many = (max(run(files, world_size, batches="per_rank", seed=1).per_rank) for world_size in (2, 6))
    assert many == few < 20


def script(source: str, *args: str, unbuffered: bool = False) -> subprocess.CompletedProcess[bytes]:
    env = os.environ | {"PYTHONUNBUFFERED": "1" if unbuffered else ""}
    command = [sys.executable, "-c", source, *args]
    return subprocess.run(command, capture_output=True, check=False, timeout=170, env=env, cwd=ROOT)


@pytest.mark.soak
def test_prints_and_an_exception_that_nobody_catches_are_those_of_a_plain_run_to_the_byte() -> None:
    plain = script(PRINTS, unbuffered=True)
    assert plain.returncode == 0
    assert len(plain.stdout) > 1_000_000
    through = script(PRINTS, "on ranks", unbuffered=True)
    assert through.stdout.split(b"\0") == [plain.stdout, plain.stdout, b""], through.stderr
    assert through.stderr.count(plain.stderr) == 2
    assert through.returncode == 1
    assert through.stderr.rstrip().endswith(b"ValueError: the message")
    assert b"on rank " in through.stderr
    assert b"in fail" in through.stderr


def test_what_c_code_left_in_its_buffers_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        ctypes.CDLL(None).printf(b"from C\n")

    run(train)
    assert capsys.readouterr().out == "from C\n"


def test_only_rank_0_is_heard_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        for line in range(200):
            print(lagom.rank(), line)

    run(train, 3)
    assert capsys.readouterr().out == "".join(f"0 {line}\n" for line in range(200))


def test_prints_appear_while_the_function_runs(tmp_path: Path) -> None:
    """The function prints on only after its first words have arrived here."""
    arrived = tmp_path / "arrived"

    class Stream:
        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> int:
            self.text += text
            arrived.touch()
            return len(text)

        def flush(self) -> None: ...

    def train() -> None:
        print("begin", end="", flush=True)
        while not arrived.exists():
            time.sleep(0.01)
        print(" end", end="", flush=True)

    stream, before = Stream(), sys.stdout
    sys.stdout = stream
    try:
        run(train)
    finally:
        sys.stdout = before
    assert stream.text == "begin end"


def test_logging_and_warnings_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        import logging
        import warnings

        logging.getLogger("mine").warning("a log line")
        warnings.warn("a warning", stacklevel=1)

    run(train)
    err = capsys.readouterr().err
    assert err.count("a log line") == 1
    assert err.count("UserWarning: a warning") == 1


# --- what is raised


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.soak)])
def test_an_exception_comes_back_with_type_message_rank_and_traceback(world_size: int) -> None:
    def train() -> None:
        if lagom.rank() == lagom.world_size() - 1:
            raise ZeroDivisionError("the learning rate")
        time.sleep(1000)

    with pytest.raises(ZeroDivisionError, match="the learning rate") as raised:
        run(train, world_size)
    cause = raised.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert cause.rank == world_size - 1
    assert 'raise ZeroDivisionError("the learning rate")' in str(cause)
    assert "in train" in str(cause)
    assert "bootstrap" not in str(cause)


def test_an_exception_comes_back_while_others_sit_in_a_collective() -> None:
    def train() -> None:
        model = torch.nn.Linear(2, 1)
        if lagom.rank() == 1:
            time.sleep(0.5)
            raise ValueError("no more data")
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()

    with pytest.raises(ValueError, match="no more data"):
        run(train)


class TwoPartsError(Exception):
    """Pickle cannot make it again: ``args`` has one part, ``__init__`` wants two."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_exception_with_an_init_of_its_own_comes_back_as_itself() -> None:
    def train() -> None:
        raise TwoPartsError(1, 2)

    with pytest.raises(TwoPartsError, match="1 and 2") as raised:
        run(train)
    assert "raise TwoPartsError(1, 2)" in str(raised.value.__cause__)


def test_an_exception_that_cannot_be_pickled_is_told_of_in_full() -> None:
    def train() -> None:
        error = OSError("holds a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(RankError, match="raised OSError: holds a lock"):
        run(train)


def test_an_exception_with_a_message_that_fails_is_told_of() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("mute")

    def train() -> None:
        raise MuteError

    with pytest.raises(MuteError) as raised:
        run(train)
    assert "raise MuteError" in str(raised.value.__cause__)


@pytest.mark.parametrize("character", ["x", pytest.param("\N{GRINNING FACE}", id="a face", marks=pytest.mark.soak)])
def test_a_message_as_long_as_a_book_comes_back(character: str) -> None:
    def train() -> None:
        raise ValueError(character * 5_000_000)

    with pytest.raises(ValueError, match=character * 3):
        run(train)


def test_a_long_message_of_lagoms_own_log_does_not_end_the_program() -> None:
    def train() -> str:
        logging.getLogger("lagom").warning("ü" * 500_000)
        return "goes on"

    assert run(train).value == "goes on"


@pytest.mark.soak  # tests/host/test_end_reports.py shows by default that they fit into a frame
def test_long_messages_of_all_ranks_come_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All ranks raise at the same moment, and the host process reports all of them at once."""
    address = f"\0{tmp_path}"

    def train() -> None:
        with socket.socket(socket.AF_UNIX) as all_are_there:
            all_are_there.connect(address)
            all_are_there.recv(1)
        raise ValueError("x" * 200_000)

    def release() -> None:
        for connection in [listener.accept()[0] for _ in range(4)]:
            connection.close()

    with socket.socket(socket.AF_UNIX) as listener, forked_server():  # a server that writes its errors to this stderr
        listener.bind(address)
        listener.listen()
        thread = threading.Thread(target=release)
        thread.start()
        with pytest.raises(ValueError, match="xxx"):
            run(train, 4)
        thread.join()
    assert "frame" not in capfd.readouterr().err


def test_the_chain_of_an_exception_is_in_its_traceback() -> None:
    def train() -> None:
        try:
            os.environ["LAGOM_MISSING"]
        except KeyError as error:
            raise ValueError("no such thing") from error

    with pytest.raises(ValueError, match="no such thing") as raised:
        run(train)
    assert "KeyError: 'LAGOM_MISSING'" in str(raised.value.__cause__)
    assert "direct cause" in str(raised.value.__cause__)


def test_the_first_failure_is_reported_and_not_the_one_that_it_causes(tmp_path: Path) -> None:
    def train() -> None:
        if lagom.rank() == 0:
            (tmp_path / "fails").touch()
            raise ValueError("the cause")
        while not (tmp_path / "fails").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        raise KeyError("later")

    with pytest.raises(ValueError, match="the cause"):
        run(train)


@pytest.mark.parametrize(
    "error",
    [
        *(KeyboardInterrupt, StopIteration, MemoryError),
        *(pytest.param(one, marks=pytest.mark.soak) for one in (GeneratorExit, RecursionError)),
    ],
)
def test_unusual_exceptions_come_back_as_themselves(error: type[BaseException]) -> None:
    def train() -> None:
        raise error

    with pytest.raises(error):
        run(train)


# --- how ranks end


def last_rank_does(action: Callable[[], Any]) -> Callable[[], None]:
    def train() -> None:
        if lagom.rank() == 1:
            action()
        time.sleep(1000)

    return train


@pytest.mark.parametrize(
    ("action", "text"),
    [
        pytest.param(lambda: sys.exit(3), r"rank 1 called sys\.exit\(3\)", marks=pytest.mark.soak),
        (lambda: sys.exit(0), r"rank 1 called sys\.exit\(0\)"),
        pytest.param(lambda: sys.exit("no data"), r"rank 1 called sys\.exit\('no data'\)", marks=pytest.mark.soak),
        pytest.param(lambda: os._exit(4), "rank 1 ended by itself with exit status 4", marks=pytest.mark.soak),
        (lambda: os._exit(0), "rank 1 ended by itself with exit status 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 was killed by SIGKILL, .* memory"),
        (lambda: ctypes.string_at(0), "rank 1 was killed by SIGSEGV"),
        pytest.param(lambda: os.abort(), "rank 1 was killed by SIGABRT", marks=pytest.mark.soak),
        (lambda: os.kill(os.getpid(), 40), "rank 1 was killed by"),
    ],
    ids=["exit 3", "exit 0", "exit text", "_exit 4", "_exit 0", "SIGKILL", "SIGSEGV", "SIGABRT", "a real-time signal"],
)
def test_a_rank_that_ends_is_a_short_clear_error(action: Callable[[], Any], text: str) -> None:
    with pytest.raises(RankError, match=text) as raised:
        run(last_rank_does(action))
    assert raised.value.rank == 1
    assert len(str(raised.value)) < 200


@pytest.mark.soak  # below, a segfault's stack is kept so by default
def test_what_a_rank_wrote_last_is_kept_for_the_report_of_its_death() -> None:
    def die() -> None:
        print("CUDA error: out of luck", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError) as raised:
        run(last_rank_does(die))
    assert "out of luck" in str(raised.value.__cause__)


def test_a_segfault_shows_where_it_was() -> None:
    with pytest.raises(RankError) as raised:
        run(last_rank_does(lambda: ctypes.string_at(0)))
    assert "test_local.py" in str(raised.value.__cause__)


def test_a_function_that_cannot_travel_is_refused_naming_the_part() -> None:
    lock = threading.Lock()
    with pytest.raises(PayloadError, match="'lock'"):
        run(lambda: lock.locked())


def test_a_result_that_cannot_travel_is_an_error_naming_the_part() -> None:
    with pytest.raises(PayloadError, match=r"rank . returned a dict, but .*lock"):
        run(lambda: {"a": 1, "lock": threading.Lock()})


def test_child_processes_and_threads_that_the_function_leaves_end_with_it() -> None:
    def train() -> list[int]:
        children = [subprocess.Popen(["sleep", "1000"]).pid]
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
            os._exit(0)
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        return [*children, pid]

    result = run(train)
    pids = [pid for each in result.per_rank for pid in each]
    assert len(pids) == 4
    assert gone(pids)


def test_threads_that_finish_their_work_are_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def train() -> None:
        def write() -> None:
            time.sleep(0.3)
            path.write_text("saved")

        threading.Thread(target=write).start()

    run(train, 1)
    assert path.read_text() == "saved"


def test_children_of_a_rank_that_dies_are_gone_too(tmp_path: Path) -> None:
    path = tmp_path / "pid"

    def die() -> None:
        path.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError):
        run(last_rank_does(die))
    assert gone([int(path.read_text())])


@pytest.mark.soak
def test_the_fork_server_may_be_killed_between_two_calls() -> None:
    assert works()
    os.kill(local.server().process.pid, signal.SIGKILL)
    assert works()


def test_the_host_process_may_be_killed_during_a_call() -> None:
    def kill_host() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(LagomError, match="gone"):
        run(kill_host)
    assert works()


# --- several calls, several drivers


def test_two_threads_can_call_at_the_same_time() -> None:
    found: dict[int, Any] = {}

    def call(number: int) -> None:
        found[number] = run(lambda: (number, lagom.rank())).per_rank

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: ((number, 0), (number, 1)) for number in range(3)}


def test_a_second_call_is_forked_from_the_same_server() -> None:
    def server() -> int:
        host = Path(f"/proc/{os.getppid()}/stat").read_text()
        return int(host.rsplit(")", 1)[1].split()[1])

    assert run(server).per_rank == run(server).per_rank == (local.server().process.pid,) * 2


def test_many_calls_leave_no_files_open() -> None:
    run(lambda: torch.ones(100_000))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        run(lambda: torch.ones(100_000))
        with pytest.raises(ValueError, match="x"):
            run(_raise)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    server = local.server().process.pid
    assert len(os.listdir(f"/proc/{server}/fd")) < 12


def _raise() -> None:
    raise ValueError("x")


def test_too_many_ranks_are_refused_at_once() -> None:
    with pytest.raises(LagomError, match="at most"):
        run(lambda: None, 1000)


@pytest.mark.soak
def test_a_driver_that_was_forked_has_a_server_of_its_own() -> None:
    assert works()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if run(lambda: 3).value == 3 else 2
            local.shut_down()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert works()


NOTEBOOK = """
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.driver import local

class MyError(Exception):
    def __init__(self, code):
        super().__init__(code)
        self.code = code

class Net:
    count = 0
    def scale(self):
        return SCALE

SCALE = 2
helper = lambda: SCALE

def train():
    if helper() != 2:
        raise MyError(SCALE)
    class Own:
        pass
    Net.count = 99
    return {"net": Net(), "class": Net, "own": Own()}

config = TorchDistributedConfig(launcher="local", world_size=2)
scale = Net.scale
value = experiment.lagom(train, config).value
assert type(value["net"]) is value["class"] is Net
assert (Net.count, Net.scale) == (0, scale), "the class of this process was written over"
assert type(value["own"]).__name__ == "Own"
# And out again, with a class that was made there.
assert type(experiment.lagom(lambda: value["own"], config).value).__name__ == "Own"
SCALE = 5
assert value["net"].scale() == 5
try:
    experiment.lagom(train, config)
except MyError as error:
    assert error.code == 5
    print("ok", local.server().process.pid)
"""


def test_classes_and_exceptions_of_a_notebook_are_its_own_and_its_end_takes_the_server_along() -> None:
    done = script(NOTEBOOK)
    assert done.returncode == 0, done.stderr
    text, server = done.stdout.split()
    assert text == b"ok"
    assert gone([int(server)])


INTERRUPTED = """
import os, sys, time
import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.driver import local

def train():
    if lagom.rank() == 0:
        print("pids", os.getpid(), os.getppid(), flush=True)
    time.sleep(1000)

config = TorchDistributedConfig(launcher="local", world_size=2)
print("server", local.server().process.pid, flush=True)
try:
    experiment.lagom(train, config)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.stdin.readline()
print("again", experiment.lagom(lambda: 3, config)["test result"], flush=True)
experiment.lagom(train, config)
"""


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[str]]:
    """A driver in a process group of its own, as a terminal starts it."""
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    yield process
    process.kill()
    process.communicate()


def heard(driver: subprocess.Popen[str]) -> list[str]:
    assert driver.stdout is not None
    return driver.stdout.readline().split()


def pids_of_run(driver: subprocess.Popen[str]) -> list[int]:
    rank, host = map(int, heard(driver)[1:])
    return [*_descendants(host), rank, host]


def test_ctrl_c_ends_the_run_the_next_call_works_and_a_killed_driver_takes_its_ranks_and_its_server_along(
    driver: subprocess.Popen[str],
) -> None:
    server = int(heard(driver)[1])
    pids = pids_of_run(driver)
    assert len(set(pids)) == 3
    os.killpg(driver.pid, signal.SIGINT)
    assert heard(driver) == ["interrupted"]
    assert gone(pids)
    assert driver.stdin is not None
    driver.stdin.write("\n")
    driver.stdin.flush()
    assert heard(driver) == ["again", "3"]
    pids = pids_of_run(driver)
    driver.kill()
    assert gone([*pids, server])


# --- which GPUs


@pytest.mark.parametrize(
    ("listing", "names"),
    [
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n", ("0", "1")),
        (
            "GPU 0: A100 (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-a)\n  MIG 1g.5gb Device 1: (UUID: MIG-b)\n",
            ("MIG-a", "MIG-b"),
        ),
        ("No devices were found\n", ()),
        ("", ()),
    ],
)
def test_gpus_are_named_as_the_mask_wants_them(listing: str, names: tuple[str, ...]) -> None:
    assert cluster.gpus_in(listing) == names


def test_an_empty_mask_hides_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cluster.visible_gpus() == ()


def test_a_mask_is_taken_at_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, MIG-a")
    assert cluster.visible_gpus() == ("1", "MIG-a")


def test_a_cpu_build_of_torch_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert cluster.visible_gpus() == ()


def test_what_lagom_says_does_not_go_into_the_programs_log(capsys: pytest.CaptureFixture[str]) -> None:
    def logs() -> str:
        import io
        import logging

        written = io.StringIO()
        logging.basicConfig(stream=written, level=logging.DEBUG)
        logging.getLogger("mine").info("of the program")
        logging.getLogger("lagom").warning("of lagom")
        return written.getvalue()

    assert run(logs)["test result"] == "INFO:mine:of the program\n"
    assert capsys.readouterr().err.count("of lagom") == 1


RARER_ENDS = [pytest.param(*end, marks=pytest.mark.soak) for end in (("returns", 0), ("exits", 3))]


@pytest.mark.parametrize(("kind", "status"), [("raises", 1), *RARER_ENDS])
def test_a_fork_that_comes_back_from_the_function_ends(kind: str, status: int, tmp_path: Path) -> None:
    def forks(kind: str, path: str) -> int | None:
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with open(f"{path}.{lagom.rank()}", "w") as file:
            file.write("a fork was here")
        if kind == "raises":
            raise ValueError("in a fork")
        if kind == "exits":
            sys.exit(3)
        return None

    config = TorchDistributedConfig(
        launcher="local", world_size=2, run_dir=None, hparams={"kind": kind, "path": str(tmp_path / "a")}
    )
    assert list(experiment.lagom(forks, config).per_rank) == [status, status]
