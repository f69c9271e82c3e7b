"""``observe.tracking.wandb``: W&B has one run. A stand-in for its ``init``; run_of_wandb.py has the real one (soak)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lagom import disk as files
from lagom.session.session import Session
from tests.ranks import RankFailedError, run_ranks

WANDB = """
import os

class Run:
    def __init__(self, settings, config):
        self.__dict__.update(settings, config=Config(config))

class Config(dict):
    def update(self, values, allow_val_change=False):
        assert allow_val_change or not set(values) & set(self)
        super().update(values)

def init(entity=None, project=None, config=None, id=None, name=None, mode=None, settings=None):
    if mode != "disabled":
        if project == "gone":
            raise ConnectionError("no server")
        id, name, entity = f"id-{os.getpid()}", f"name-{os.getpid()}", "team"
        config = {**(config or {}), "lr": 0.25, "sizes": [1, 2], "of a sweep": {"depth": 3, "object": object}}
    return Run({"id": id, "name": name, "project": project, "entity": entity, "mode": mode}, config or {})
"""
"""As much of W&B as ``init`` needs: a server that chooses values of the config, as for a sweep."""


@pytest.fixture(autouse=True)
def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)


def begin(session: Session, **arguments: Any) -> dict[str, Any]:
    """Begin a run as a program does, and return what it finds."""
    import wandb

    run = wandb.init("ours", "points", {"lr": 0.1, "epochs": 3}, **arguments)
    return {"made by": os.getpid(), **vars(run), "config": dict(run.config)}


def test_other_ranks_have_a_disabled_run_that_looks_like_rank_0s() -> None:
    first, *others = run_ranks(3, begin)
    assert first["id"] == f"id-{first['made by']}"
    assert first["mode"] is None
    for other in others:
        assert other["mode"] == "disabled"
        assert [other[name] for name in ("id", "name", "project", "entity")] == [
            first[name] for name in ("id", "name", "project", "entity")
        ]
        config = {"lr": 0.25, "epochs": 3, "sizes": [1, 2], "of a sweep": {"depth": 3}}  # an object does not travel
        assert other["config"] == config
    assert "wandb" not in sys.modules


def test_a_program_that_knows_its_rank_may_begin_a_run_on_rank_0_alone() -> None:
    def run(session: Session) -> str:
        files.asked_for_rank()
        return str(begin(session)["id"]) if session.rank == 0 else ""

    assert [bool(found) for found in run_ranks(2, run)] == [True, False]


@pytest.mark.soak  # tests/driver/test_local.py has errors of one rank by default
def test_a_run_that_cannot_begin_is_rank_0s_error() -> None:
    def run(session: Session) -> None:
        import wandb

        wandb.init(project="gone")

    with pytest.raises(RankFailedError, match="no server"):
        run_ranks(2, run)
