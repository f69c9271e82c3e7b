"""A program that is distributed already: on lagom's ranks it is what it is under torchrun."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch.distributed as dist

from lagom import cli
from lagom.session.session import Session
from tests.programs import judge
from tests.programs.expectations import DISTRIBUTED

pytestmark = pytest.mark.skipif(
    find_spec("lagom.distributed.init_process_group") is None, reason="joining is not built yet"
)


def as_torchrun(world_size: int) -> Callable[[Session], None]:
    """Sets the environment that torchrun gives, on each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def enter(session: Session) -> None:
        place = {"RANK": session.rank, "WORLD_SIZE": world_size, "LOCAL_RANK": session.rank}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        destroy = dist.destroy_process_group

        def keeping_destroy(group: Any = None) -> None:
            _kept.append(dist.group.WORLD)
            destroy(group)

        # A gloo group that is let go of may hang in torch; see Note [Kept groups] in distributed/init_process_group.py.
        # This process was forked for the run.
        dist.destroy_process_group = keeping_destroy

    return enter


_kept: list[object] = []


def under_torchrun(program: str, world_size: int) -> judge.Run:
    """The program in unpatched processes with the environment that torchrun gives."""
    return judge.on_ranks(program, {}, world_size, before=as_torchrun(world_size), patches=False)


@pytest.mark.parametrize(
    ("batches", "world_size"),
    [
        ("split", 2),
        pytest.param("whole", 2, marks=pytest.mark.soak),
        *(pytest.param(batches, ranks, marks=pytest.mark.soak) for batches in ("split", "whole") for ranks in (1, 3)),
    ],
)
@pytest.mark.parametrize("program", DISTRIBUTED)
def test_a_distributed_program_gives_what_it_gives_under_torchrun(program: str, batches: str, world_size: int) -> None:
    plain = under_torchrun(program, world_size)
    # On one rank nothing is patched, and the program makes a group of its own.
    before = as_torchrun(1) if world_size == 1 else lambda _: None
    run = judge.on_ranks(program, {}, world_size, before=before, batches=batches)
    for rank, wanted in zip(run.ranks, plain.ranks, strict=True):
        assert judge.differences(rank.value, wanted.value, tolerance=0.0) == []
        assert (rank.text, rank.passes, rank.left) == (wanted.text, wanted.passes, [])
    assert run.files == plain.files


@pytest.mark.soak  # tests/test_distributed_programs.py and the test above
@pytest.mark.parametrize("program", DISTRIBUTED)
def test_a_distributed_script_runs(
    program: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = under_torchrun(program, 2)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with judge.scratch() as folder:
        status = cli.main(["run", "-n", "2", str(judge.HERE / f"{program}.py")])
        found = judge.files_in(folder)
    printed, errors = capfd.readouterr()
    assert status == 0, errors
    assert printed == plain.ranks[0].text
    assert judge.file_differences({name: found[name] for name in plain.files}, plain.files) == []
    assert sorted(found.keys() - plain.files.keys()) == ["result.pt"]
