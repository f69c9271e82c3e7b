"""Programs for torchrun, as they are: scripts by ``lagom run``, functions on Spark. torchrun is the judge."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lagom import cli, experiment
from lagom.config import TorchDistributedConfig
from tests import distributed_programs as programs


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[str, Path]]:
    """Run the script by torchrun, once for each number of ranks; return its output and the folder of its files."""

    @functools.cache
    def start(world_size: int) -> tuple[str, Path]:
        folder = tmp_path_factory.mktemp("torchrun") / "wanted"
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}", "--no-python")
        return run(folder, "torchrun", *torchrun, sys.executable), folder

    return start


@pytest.mark.soak  # tests/programs/test_distributed.py has a script by default, and the numbers under torchrun
@pytest.mark.parametrize(("form", "world_size"), [("torchrun", 2), ("fallback", 2), ("torchrun", 3), ("fallback", 3)])
def test_a_script_ends_with_the_weights_that_torchrun_gives(
    tmp_path: Path, under_torchrun: Callable[[int], tuple[str, Path]], form: str, world_size: int
) -> None:
    # Under torchrun a gloo group that is left as it is aborts its process at exit now and then; what both forms
    # compute is the same.
    wanted, folder = under_torchrun(world_size)
    found = run(tmp_path / "found", form, "-m", "lagom.cli", "run", "-n", str(world_size))
    assert found == wanted
    assert found.count("loss") == 2, "rank 0 prints a line per epoch"
    for rank in range(world_size):
        mine, theirs = (torch.load(path / f"rank{rank}.pt") for path in (tmp_path / "found", folder))
        assert same(mine, theirs)
    assert (tmp_path / "found" / "best.pt").exists()


@pytest.mark.soak  # tests/distributed/test_mp_spawn.py spawns by default
def test_a_script_that_spawns_its_ranks_gives_the_same(
    tmp_path: Path, under_torchrun: Callable[[int], tuple[str, Path]]
) -> None:
    wanted, folder = under_torchrun(2)
    found = run(tmp_path / "found", "spawn", "-m", "lagom.cli", "run", "-n", "2")
    assert found == wanted
    for rank in range(2):
        assert same(*(torch.load(path / f"rank{rank}.pt") for path in (tmp_path / "found", folder)))


@pytest.mark.soak  # tests/distributed/test_mp_spawn.py shows by default that one rank spawns as torch does
def test_one_rank_that_spawns_gives_the_same(tmp_path: Path, under_torchrun: Callable[[int], tuple[str, Path]]) -> None:
    wanted, _ = under_torchrun(2)
    assert run(tmp_path / "alone", "spawn", "-m", "lagom.cli", "run", "-n", "1") == wanted


@pytest.mark.soak
@pytest.mark.parametrize("spark", ["local[2]", "local-cluster"], indirect=True)
def test_on_spark_it_is_torchruns_world_too(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", sys.executable)
    run(tmp_path / "wanted", "torchrun", *torchrun)
    for function in (programs.by_variables, programs.or_alone):
        folder = tmp_path / function.__name__
        folder.mkdir()
        hparams = {"folder": str(folder)}
        found = experiment.lagom(function, TorchDistributedConfig(launcher="spark", world_size=2, hparams=hparams))
        assert found.per_rank[0] == found.per_rank[1]
        for rank in range(2):
            mine, theirs = (torch.load(path / f"rank{rank}.pt") for path in (folder, tmp_path / "wanted"))
            assert same(mine, theirs)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 2])
def test_processes_of_the_ranks_meet_at_the_masters_port(world_size: int, tmp_path: Path) -> None:
    def program() -> tuple[dict[str, str], str]:
        variables = {name: os.environ[name] for name in programs.VARIABLES}
        # Two processes, one after the other: every time it is a world of its own. The second begins when the first has
        # ended on all ranks, whose store has the same port.
        code = """
import os, time
import torch.distributed
for number in range(2):
    if os.fork() == 0:
        torch.distributed.init_process_group("gloo")
        print(torch.distributed.get_rank(), torch.distributed.get_world_size(), flush=True)
        torch.distributed.barrier()  # nobody may still read the store of a process that has ended
        os._exit(0)
    os.wait()
    os.mkdir(f"{folder}/{number}-{os.environ['RANK']}")
    while sum(name.startswith(str(number)) for name in os.listdir(folder)) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
"""
        done = subprocess.run(
            [sys.executable, "-c", f"folder = {str(tmp_path)!r}{code}"], capture_output=True, text=True
        )
        torch.distributed.is_initialized() or torch.distributed.init_process_group()
        return variables, done.stdout + done.stderr

    result = experiment.lagom(program, TorchDistributedConfig(launcher="local", world_size=world_size))
    for rank, (variables, said) in enumerate(result.per_rank):
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == str(world_size)
        assert said == f"{rank} {world_size}\n" * 2


def run(folder: Path, form: str, *python: str) -> str:
    """Run the script, check that it succeeds, and return its output."""
    folder.mkdir()
    script = str(Path(programs.__file__))
    done = subprocess.run(
        [sys.executable, *python, script, form, str(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def same(mine: Any, theirs: Any) -> bool:
    """Bit for bit."""
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
