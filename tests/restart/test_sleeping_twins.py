"""Sleeping twins: killed ranks go on from the middle of a pass, and the run is like one that was not killed."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.restart import twin_pace
from lagom.restart.history import BEGINNING
from lagom.result import Result
from tests.launchers.losses import record, wait_for

POINTS = torch.rand(96, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(POINTS, POINTS.prod(dim=1, keepdim=True))
PAUSE_S = 0.1
"""Time of a step while the test waits for twins, which are tried after 1, 2 and 6 s at the earliest."""
GATE = "LAGOM_TEST_GATE"
"""Variable with the path of a file that is there for as long."""
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="twins need Linux")


def learner() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    pause()
    return loss.item()


def pause() -> None:
    """Take time while the test waits for twins."""
    if os.path.exists(os.environ.get(GATE, "")):
        time.sleep(PAUSE_S)


def evaluates(folder: str) -> dict[str, Any]:
    """Train and evaluate in turns, draw random numbers of all kinds, and append to files."""
    model, optimizer = learner()
    seen, held = [], open(f"{folder}/held.txt", "w")  # noqa: SIM115  (open all the time)
    open(f"{folder}/rows.csv", "a").close()  # a new file in the middle of a pass would end the twins
    for epoch in range(12):
        model.train()
        losses = [step(model, optimizer, x, y) for x, y in DataLoader(DATA, batch_size=8, shuffle=True)]
        model.eval()
        with torch.no_grad():
            total = sum(float(nn.functional.l1_loss(model(x), y)) for x, y in DataLoader(DATA, batch_size=16))
        seen.append([*losses, total, random.random(), float(np.random.rand())])
        held.write(f"{epoch} {seen[-1]}\n")
        with open(f"{folder}/rows.csv", "a") as rows:
            rows.write(f"{epoch},{total}\n")
        print(f"epoch {epoch}: {seen[-1]}")
    held.close()
    return {"seen": seen, **model.state_dict()}


def evaluates_by_rows(folder: str) -> dict[str, Any]:
    """Do so with a model whose rows ranks share out, however small it is."""
    from lagom.row_split import whole_batch

    whole_batch.ALWAYS = True
    return evaluates(folder)


def accumulates(folder: str) -> dict[str, Any]:
    """Collect the gradients of four batches for each step, below a progress bar; and have a thread of pyarrow's."""
    import pyarrow as pa
    from tqdm import tqdm  # type: ignore[import-untyped]

    table = pa.array(range(1000), memory_pool=pa.jemalloc_memory_pool())
    assert "jemalloc_bg_thd" in [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    model, optimizer = learner()
    seen = []
    for epoch in range(12):
        table = pa.concat_arrays([table, table[:1000]], memory_pool=pa.jemalloc_memory_pool())
        for number, (x, y) in enumerate(tqdm(DataLoader(DATA, batch_size=8, shuffle=True), mininterval=1e9)):
            loss = nn.functional.mse_loss(model(x), y) / 4
            loss.backward()
            seen.append(loss.item())
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            pause()
        print(f"epoch {epoch}: {seen[-1]}")
    return {"seen": seen, **model.state_dict()}


class Stream(IterableDataset[torch.Tensor]):
    """A stream with a state of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        for _ in range(1200):
            yield torch.rand(4, dtype=torch.float64, generator=generator)


def streams(folder: str) -> dict[str, Any]:
    """Read a stream to its end, write events for TensorBoard, and now and then compute in several threads."""
    from torch.utils.tensorboard import SummaryWriter

    torch.set_num_threads(2)
    model, optimizer = learner()
    writer, seen = SummaryWriter(folder), []
    for number, rows in enumerate(DataLoader(Stream(), batch_size=8)):
        seen.append(step(model, optimizer, rows[:, :3], rows[:, 3:]))
        writer.add_scalar("loss", seen[-1], number)
        if number % 15 == 0:
            print(number, seen[-1], torch.rand(200_000).exp().sum().item())
    writer.close()
    return {"seen": seen, **model.state_dict()}


class Drawn(TensorDataset):
    """Points to which workers add numbers that they draw."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = (tensor[index] for tensor in self.tensors)
        return x + torch.rand(3) + random.random(), y


def with_workers(folder: str) -> dict[str, Any]:
    """Load by workers: twins are forked between passes."""
    model, optimizer = learner()
    seen = []
    for epoch in range(11):
        loader = DataLoader(Drawn(*DATA.tensors), batch_size=8, shuffle=True, num_workers=1)
        seen.append([step(model, optimizer, x, y) for x, y in loader])
        print(f"epoch {epoch}: {seen[-1]}")
    return {"seen": seen, **model.state_dict()}


def has_long_passes(folder: str) -> dict[str, Any]:
    """Load by workers that end in the middle of a pass of other ones."""
    model, optimizer = learner()
    seen = []
    for epoch in range(5):
        for number, (x, y) in enumerate(DataLoader(DATA, batch_size=2, shuffle=True, num_workers=1)):
            seen.append(step(model, optimizer, x, y))
            if number == 0:
                seen.append(float(sum(x.sum() for x, _ in DataLoader(DATA, batch_size=48, num_workers=1))))
        print(f"epoch {epoch}: {seen[-1]}")
    return {"seen": seen, **model.state_dict()}


def saves(folder: str) -> dict[str, Any]:
    """Save a file now and then, and read what the last epoch has saved in the middle of the next one."""
    model, optimizer = learner()
    seen = []
    for epoch in range(6):
        for number, (x, y) in enumerate(DataLoader(DATA, batch_size=4, shuffle=True)):
            seen.append(step(model, optimizer, x, y))
            if epoch and number == 12:
                seen.append(float(torch.load(f"{folder}/state.pt")["0.bias"].sum()))
        torch.save(model.state_dict(), f"{folder}/state.pt")
        os.makedirs(f"{folder}/epoch-{epoch}")
        print(f"epoch {epoch}: {seen[-1]}")
    return {"seen": seen, **model.state_dict()}


def sets_times(folder: str) -> dict[str, Any]:
    """Set a file's time in each pass, and read it in the next one."""
    model, optimizer = learner()
    seen: list[float] = []
    path = f"{folder}/stamp"
    open(path, "w").close()
    os.utime(path, (0, 0))
    for _ in range(8):
        for x, y in DataLoader(DATA, batch_size=4, shuffle=True):
            step(model, optimizer, x, y)
        seen.append(os.stat(path).st_mtime)
        os.utime(path, (0, seen[-1] + 1))
    return {"seen": seen, **model.state_dict()}


def run(
    program: Callable[[str], dict[str, Any]],
    folder: Path,
    world_size: int,
    kills: Sequence[int],
    ready: Callable[[Path], bool] = lambda _: True,
    **settings: Any,
) -> tuple[Result, dict[str, bytes]]:
    """Run ``program``, and kill these ranks one after another, each after twins have been forked; return the files.

    Args:
        ready: whether the program has come to where it is to be killed, by the folder of its files.
    """
    files = folder / "files"
    files.mkdir(parents=True)
    config = TorchDistributedConfig(
        launcher="local",
        world_size=world_size,
        run_dir=folder / "run",
        sleeping_twins=True,
        hparams={"folder": str(files)},
        **{"max_failures": len(kills), **settings},
    )
    with held_back(folder, lambda over: kill_each(kills, folder / "run", lambda: ready(files), over)):
        result = experiment.lagom(program, config)
    return result, {path.name: path.read_bytes() for path in sorted(files.rglob("*")) if path.is_file()}


@contextmanager
def held_back(folder: Path, until: Callable[[threading.Event], None]) -> Iterator[None]:
    """Have a program pause in each step until ``until`` returns, which is told when the program has ended."""
    gate = folder / "slowly"
    over, failed = threading.Event(), list[BaseException]()

    def watch() -> None:
        try:
            until(over)
        except BaseException as error:
            failed.append(error)
        gate.unlink()

    gate.touch()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with patch.dict(os.environ, {GATE: str(gate)}):
            yield
    finally:
        over.set()
        thread.join()
    assert not failed, failed


def kill_each(kills: Sequence[int], run_dir: Path, ready: Callable[[], bool], over: threading.Event) -> None:
    """Kill these ranks one after another, each some steps after its twin was forked, or later when ``ready``."""
    before: dict[str, Any] = {"failures": [], "ranks": {}}
    for rank in kills:
        found = before
        while not have_new_twins(before, found) and not over.is_set():
            wait_for(lambda known=found: over.is_set() or facts(run_dir) != known)  # type: ignore[misc]
            found = facts(run_dir) or found
        over.wait(5 * PAUSE_S)
        wait_for(lambda: over.is_set() or ready())
        assert not over.is_set(), "the run has ended before"
        os.kill(found["ranks"][str(rank)]["pid"], signal.SIGKILL)
        before = found | {"failures": [*found["failures"], rank]}


def have_new_twins(before: dict[str, Any], found: dict[str, Any]) -> bool:
    """Return whether ``found`` in run.json are other processes with other twins, or such as have begun again."""
    pids = [one.get("pid") for one in found["ranks"].values()]
    if len(found["failures"]) != len(before["failures"]) or not pids or None in pids:
        return False
    if set(pids) & {one["pid"] for one in before["ranks"].values()}:
        return False
    begins_again = bool(found["failures"]) and found["failures"][-1]["resumed_from"] == BEGINNING
    return begins_again or found.get("twins") not in (None, before.get("twins"))


def facts(run_dir: Path) -> dict[str, Any]:
    """Return run.json; nothing while it is not there, or being written."""
    with contextlib.suppress(ValueError):
        return record(run_dir)
    return {}


def without_twins(program: Callable[[str], dict[str, Any]], folder: Path) -> tuple[Result, str]:
    """Run ``program``, which cannot have twins, until the record says why; return what it says."""

    with held_back(folder, lambda over: wait_for(lambda: over.is_set() or "without_twins" in facts(folder / "run"))):
        config = TorchDistributedConfig(
            launcher="local", world_size=2, run_dir=folder / "run", sleeping_twins=True, hparams={"folder": str(folder)}
        )
        result = experiment.lagom(program, config)
    assert result.failures == []
    return result, record(folder / "run")["without_twins"]


def events(data: bytes, folder: Path) -> list[Any]:
    """Return the numbers in a file of TensorBoard's."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    path = folder / "events"
    path.write_bytes(data)
    return [
        (event.step, [value.tensor.float_val[:] for value in event.summary.value])
        for event in EventFileLoader(str(path)).Load()
    ]


def content(files: dict[str, bytes], folder: Path) -> dict[str, Any]:
    """Return files by name, in a form that is equal for equal content."""
    return {
        "events" if "tfevents" in name else name: events(data, folder) if "tfevents" in name else data
        for name, data in files.items()
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether all values have the same bits."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) if isinstance(one[name], torch.Tensor) else one[name] == other[name]
        for name in one
    )


@pytest.mark.parametrize(
    ("program", "world_size", "kills", "settings"),
    [
        pytest.param(evaluates, 2, [0], {}, marks=pytest.mark.soak),
        pytest.param(evaluates_by_rows, 3, [2], {}, marks=pytest.mark.soak),
        (evaluates, 3, [1, 2], {"batches": "split"}),
        (accumulates, 2, [1], {}),
        pytest.param(streams, 2, [1], {}, marks=pytest.mark.soak),
        pytest.param(with_workers, 2, [1], {}, marks=pytest.mark.soak),
        pytest.param(with_workers, 2, [0], {"share_workers": True}, marks=pytest.mark.soak),
        # Passes of 5 s, between which alone there are twins; else what the two before show.
        pytest.param(has_long_passes, 2, [1], {}, marks=pytest.mark.soak),
    ],
)
def test_a_killed_rank_goes_on_within_the_pass(
    program: Callable[[str], dict[str, Any]],
    world_size: int,
    kills: list[int],
    settings: dict[str, Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    whole, files = run(program, tmp_path / "whole", world_size, [], **settings)
    text = capfd.readouterr().out
    killed, files_killed = run(program, tmp_path / "killed", world_size, kills, **settings)
    found = capfd.readouterr()
    assert all(same(one, other) for one, other in zip(whole.per_rank, killed.per_rank, strict=True))
    assert found.out == text
    assert content(files_killed, tmp_path) == content(files, tmp_path)
    assert [failure["rank"] for failure in killed.failures] == kills
    for failure in killed.failures:
        assert re.fullmatch(r"batch \d+ of epoch \d+|after \d+ backwards", failure["resumed_from"]), failure
    assert found.err.count("the run goes on from") == len(kills)


@pytest.mark.soak
def test_a_file_whose_time_was_set_is_found_as_it_was(tmp_path: Path) -> None:
    whole, _ = run(sets_times, tmp_path / "whole", 2, [])
    killed, _ = run(sets_times, tmp_path / "killed", 2, [1], lambda files: os.stat(files / "stamp").st_mtime > 0)
    assert same(whole.per_rank[0], killed.per_rank[0])


def test_files_that_were_rewritten_are_found_as_they_were(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole, _ = run(saves, tmp_path / "whole", 2, [])
    text = capfd.readouterr().out
    killed, files = run(saves, tmp_path / "killed", 2, [0, 1])
    assert same(whole.per_rank[0], killed.per_rank[0])
    assert capfd.readouterr().out == text
    assert len(killed.failures) == 2
    assert list(files) == ["state.pt"]


def keeps_a_thread(folder: str) -> dict[str, Any]:
    """Train beside a thread of the program's."""
    thread = threading.Thread(target=time.sleep, args=(600,), name="watcher", daemon=True)
    thread.start()
    model, optimizer = learner()
    for _ in range(60):
        for x, y in DataLoader(DATA, batch_size=48):
            step(model, optimizer, x, y)
    return {}


def test_a_program_with_a_thread_has_no_twins_and_the_record_says_so(tmp_path: Path) -> None:
    _, why = without_twins(keeps_a_thread, tmp_path)
    assert why == "the program has a thread, watcher"


def changes_a_kept_batch(folder: str) -> dict[str, Any]:
    """Change in each step a batch that a worker has loaded, which lies in memory that it has shared."""
    twin_pace.SHARE = 0.3
    model, optimizer = learner()
    kept = next(iter(DataLoader(TensorDataset(torch.zeros(16, 1 << 18)), batch_size=16, num_workers=1)))[0]
    seen = []
    for epoch in range(20):
        for x, y in DataLoader(DATA, batch_size=8, shuffle=True):
            kept += 1
            step(model, optimizer, x, y)
        seen.append((epoch, kept[0, 0].item(), kept[-1, -1].item(), kept.double().mean().item()))
    return {"seen": seen, **model.state_dict()}


def test_a_batch_that_workers_have_shared_is_the_twins_own(tmp_path: Path) -> None:
    whole, _ = run(changes_a_kept_batch, tmp_path / "whole", 2, [])
    killed, _ = run(changes_a_kept_batch, tmp_path / "killed", 2, [1, 0])
    assert [failure["resumed_from"] for failure in killed.failures if failure["resumed_from"] == BEGINNING] == []
    assert len(killed.failures) == 2
    assert all(same(one, other) for one, other in zip(whole.per_rank, killed.per_rank, strict=True))


def cannot_fork_twice(folder: str) -> dict[str, Any]:
    """Train where a process that was forked can fork no further one."""
    fork, own = os.fork, os.getpid()

    def refuse() -> int:
        if os.getpid() != own:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    os.fork = refuse
    model, optimizer = learner()
    for _ in range(60):
        for x, y in DataLoader(DATA, batch_size=48):
            step(model, optimizer, x, y)
    return {}


def test_twins_that_could_not_be_forked_are_told_of(tmp_path: Path) -> None:
    assert without_twins(cannot_fork_twice, tmp_path)[1] == "it could not be forked"


def cannot_fork_at_first(folder: str) -> dict[str, Any]:
    """Train where the process between a rank and its first twin can fork no further one."""
    twin_pace.SHARE = 0.5
    fork, own, count = os.fork, os.getpid(), [0]

    def refuse_once() -> int:
        count[0] += os.getpid() == own
        if os.getpid() != own and count[0] == 1:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    os.fork = refuse_once
    model, optimizer = learner()
    for _ in range(20):
        for x, y in DataLoader(DATA, batch_size=8):
            step(model, optimizer, x, y)
    return model.state_dict()


def test_twins_are_forked_again_after_one_could_not_be(tmp_path: Path) -> None:
    killed, _ = run(cannot_fork_at_first, tmp_path, 2, [1])
    assert [failure["resumed_from"] == BEGINNING for failure in killed.failures] == [False]


def ends_slowly(folder: str) -> dict[str, Any]:
    """Train where each process takes a while to end, so also the one between a rank and its twin."""
    end = os._exit

    def end_slowly(status: int) -> NoReturn:
        time.sleep(0.5)
        end(status)

    os._exit = end_slowly
    model, optimizer = learner()
    for _ in range(60):
        for x, y in DataLoader(DATA, batch_size=48):
            step(model, optimizer, x, y)
    return {}


def test_twins_count_once_no_process_stands_between(tmp_path: Path) -> None:
    states: list[str] = []

    def look(over: threading.Event) -> None:
        wait_for(lambda: over.is_set() or "twins" in facts(tmp_path / "run"))
        for rank in record(tmp_path / "run")["ranks"].values():
            children = Path(f"/proc/{rank['pid']}/task/{rank['pid']}/children").read_text().split()
            states.append("".join(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] for pid in children))

    with held_back(tmp_path, look):
        config = TorchDistributedConfig(
            launcher="local", world_size=2, run_dir=tmp_path / "run", sleeping_twins=True, hparams={"folder": ""}
        )
        experiment.lagom(ends_slowly, config)
    assert set(states) <= {"", "Z"}
    assert len(states) == 2


class Counted(TensorDataset):
    """Points that workers count in memory that they share with the program."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.count = torch.zeros(1, dtype=torch.long).share_memory_()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        self.count += 1
        return tuple(tensor[index] for tensor in self.tensors)


def counts(folder: str) -> dict[str, Any]:
    """Read after each pass how many points the worker has loaded."""
    model, optimizer = learner()
    data, seen = Counted(*(tensor[:32] for tensor in DATA.tensors)), []
    for _ in range(10):
        for x, y in DataLoader(data, batch_size=4, num_workers=1):
            step(model, optimizer, x, y)
        seen.append(int(data.count))
    return {"seen": seen, **model.state_dict()}


def test_memory_that_a_program_shares_with_its_workers_stays_shared(tmp_path: Path) -> None:
    config = TorchDistributedConfig(launcher="local", world_size=2, hparams={"folder": str(tmp_path)})
    plain = experiment.lagom(counts, config)
    twins, why = without_twins(counts, tmp_path)
    assert all(same(one, other) for one, other in zip(plain.per_rank, twins.per_rank, strict=True))
    assert why.startswith("the program shares memory, /dev/shm/torch_")


def rewrites_its_status(folder: str) -> dict[str, Any]:
    """Write a line over the one before, in a file that is open all the time."""
    model, optimizer = learner()
    status = open(f"{folder}/status.txt", "w")  # noqa: SIM115  (open all the time)
    for epoch in range(10):
        for number, (x, y) in enumerate(DataLoader(DATA, batch_size=8, shuffle=True)):
            step(model, optimizer, x, y)
            status.seek(0)
            status.write(f"{'x' * (number * 7 % 20)} {epoch} {number}\n")
            status.truncate()
            status.flush()
    status.close()
    return model.state_dict()


def test_twins_that_cannot_go_on_are_no_second_loss(tmp_path: Path) -> None:
    whole, files = run(rewrites_its_status, tmp_path / "whole", 2, [])
    killed, files_killed = run(rewrites_its_status, tmp_path / "killed", 2, [1])
    assert all(same(one, other) for one, other in zip(whole.per_rank, killed.per_rank, strict=True))
    assert files_killed == files
    assert [failure["resumed_from"] for failure in killed.failures] == ["the beginning"]


def gets_a_hidden_thread(folder: str) -> dict[str, Any]:
    """Have a thread that is not Python's from the third pass on."""
    twin_pace.SHARE = 0.5  # on a busy machine, where a fork takes long, the next one would be a minute away
    model, optimizer = learner()
    for epoch in range(20):
        for x, y in DataLoader(DATA, batch_size=8, shuffle=True):
            print(epoch, step(model, optimizer, x, y), flush=True)
        if epoch == 2:
            faulthandler.dump_traceback_later(1000)
    faulthandler.cancel_dump_traceback_later()
    return model.state_dict()


def test_output_is_shown_once_after_forks_that_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole, _ = run(gets_a_hidden_thread, tmp_path / "whole", 2, [])
    text = capfd.readouterr().out
    run_dir = tmp_path / "killed" / "run"
    killed, _ = run(gets_a_hidden_thread, tmp_path / "killed", 2, [1], lambda _: "without_twins" in facts(run_dir))
    assert capfd.readouterr().out == text
    assert len(killed.failures) == 1
    assert all(same(one, other) for one, other in zip(whole.per_rank, killed.per_rank, strict=True))
    assert record(run_dir)["without_twins"] == "the program has threads that are not Python's"


def redirects_its_output(folder: str) -> dict[str, Any]:
    """Write what is printed into a file."""
    model, optimizer = learner()
    log = os.open(f"{folder}/out.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.close(log)
    for epoch in range(12):
        for x, y in DataLoader(DATA, batch_size=8, shuffle=True):
            step(model, optimizer, x, y)
        print("epoch", epoch, flush=True)
    return {}


def test_a_program_that_redirects_its_output_has_no_twins(tmp_path: Path) -> None:
    _, why = without_twins(redirects_its_output, tmp_path)
    assert (tmp_path / "out.log").read_text() == "".join(f"epoch {epoch}\n" for epoch in range(12))
    assert why == "the program has put another file in the place of its output"


def counts_at_the_head(folder: str) -> dict[str, Any]:
    """Append records to a long file, whose head says how many there are and is read back."""
    model, optimizer = learner()
    held, seen = open(f"{folder}/held.txt", "w"), []  # noqa: SIM115  (open all the time)
    held.write("0" * 8 + "x" * 20_000)
    held.flush()
    for number in range(10 * 12):
        for x, y in DataLoader(DATA, batch_size=96):
            step(model, optimizer, x, y)
        seen.append(int(Path(f"{folder}/held.txt").read_text()[:8]))
        held.seek(0)
        held.write(f"{seen[-1] + 1:08}")
        held.seek(0, os.SEEK_END)
        held.write(f"{number}\n")
        held.flush()
    held.close()
    return {"seen": seen, **model.state_dict()}


@pytest.mark.soak
def test_a_held_file_whose_head_was_changed_is_found_as_it_was(tmp_path: Path) -> None:
    whole, files = run(counts_at_the_head, tmp_path / "whole", 2, [])
    killed, files_killed = run(counts_at_the_head, tmp_path / "killed", 2, [1])
    assert same(whole.per_rank[0], killed.per_rank[0])
    assert files_killed == files


def starts_a_program(folder: str) -> dict[str, Any]:
    """Have another program write a file in the middle of a pass, and be killed right after it the first time."""
    model, optimizer = learner()
    for number, (x, y) in enumerate(DataLoader(DATA, batch_size=1)):
        step(model, optimizer, x, y)
        time.sleep(0.03 * (not os.path.exists(f"{folder}/made")))  # for twins to be there by then
        if number == 60 and not os.path.exists(f"{folder}/made"):
            subprocess.run(["touch", f"{folder}/made"], check=True)
            os.kill(os.getpid(), signal.SIGKILL)
    return {}


@pytest.mark.soak
def test_twins_end_when_another_program_is_started(tmp_path: Path) -> None:
    killed, _ = run(starts_a_program, tmp_path, 2, [], max_failures=1)
    assert [failure["resumed_from"] for failure in killed.failures] == ["the beginning"]
