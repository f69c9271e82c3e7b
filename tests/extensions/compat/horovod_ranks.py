"""Runs checks on ranks that have called ``hvd.init``: all of a file in one fork of ranks for each world size."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

import lagom.extensions.compat.horovod.torch as hvd
from lagom.session.session import Session
from lagom.world import Place, place_set
from tests.ranks import run_ranks

Check = Callable[[int, int], Any]
"""Gets rank and size."""
WORLDS = (1, pytest.param(2, marks=pytest.mark.soak), 3)


def program(function: Callable[[], Any]) -> Callable[[Session], Any]:
    """``function`` as the program of a run, which is no Horovod program before it calls ``hvd.init``."""

    def run(session: Session) -> Any:
        place = Place(session.rank, session.world_size, session.local_rank, session.local_world_size)
        with place_set(place):
            try:
                return function()
            finally:
                hvd.shutdown()

    return run


def run_checks(checks: Sequence[Check], world_size: int) -> Mapping[str, str]:
    """Run all checks, and return the traceback of each by its name, or ""."""

    def everything() -> dict[str, str]:
        hvd.init()
        return {check.__name__: _outcome(check) for check in checks}

    ranks = run_ranks(world_size, program(everything))
    return {name: "\n".join(filter(None, (each[name] for each in ranks))) for name in ranks[0]}


def _outcome(check: Check) -> str:
    try:
        check(hvd.rank(), hvd.size())
    except Exception:
        return f"on rank {hvd.rank()}:\n{traceback.format_exc()}"
    return ""


def checked(checks: Sequence[Check]) -> Callable[[str, int], None]:
    """Make the function that a parametrized test calls with the name of a check and a world size."""
    outcomes = functools.cache(functools.partial(run_checks, tuple(checks)))

    def test(name: str, world_size: int) -> None:
        problem = outcomes(world_size)[name]
        assert not problem, problem

    return test
