"""A run on this machine opens no door: nothing of it listens, and another user of the machine gets at nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.exchange.native import native
from tests.doors import listening
from tests.driver.listening_programs import as_a_distributed_program, as_a_run, as_nobody, held_open, train


@pytest.mark.parametrize("program", [as_a_run, as_a_distributed_program])
@pytest.mark.skipif(native() is None, reason="torch's groups are gloo without the compiled part")
def test_no_process_of_a_run_on_one_machine_listens(program: Any) -> None:
    config = TorchDistributedConfig(launcher="local", world_size=2, batches="whole", seed=0)
    assert experiment.lagom(program, config).per_rank == ([], [])


def test_nor_does_one_without_the_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_NATIVE", "0")

    def looked_at() -> Any:
        before = listening(held_open())
        return before, train(), listening(held_open())

    config = TorchDistributedConfig(launcher="local", world_size=2, batches="split", seed=0)
    for before, losses, after in experiment.lagom(looked_at, config).per_rank:
        assert (before, after) == ([], [])
        assert len(losses) == 12


def test_the_search_for_listeners_finds_them(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0lagom-test-of-doors")
        unix.listen()
        found = listening([os.getpid()])
        assert f"tcp 127.0.0.1:{tcp.getsockname()[1]}" in found
        assert "unix @lagom-test-of-doors" in found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_of_the_machine_gets_at_nothing_of_a_run() -> None:
    def attacked() -> Any:
        first = train()
        taken = as_nobody(os.getppid()) if lagom.rank() == 0 else []
        return first, train(), taken

    config = TorchDistributedConfig(launcher="local", world_size=2, batches="whole", seed=0)
    plain = train(), train()
    for rank, (first, second, taken) in enumerate(experiment.lagom(attacked, config).per_rank):
        assert (first, second) == (pytest.approx(plain[0], abs=1e-12), pytest.approx(plain[1], abs=1e-12))
        assert taken == [], f"rank {rank}"
