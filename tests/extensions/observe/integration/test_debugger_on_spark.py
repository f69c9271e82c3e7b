"""A person debugs a rank in a task of Spark's, over the same channel as on this machine."""

from __future__ import annotations

from typing import Any

import pytest

import lagom
from lagom.errors import LagomError
from tests.integration import programs
from tests.person import Person, person

__all__ = ["person"]

pytestmark = [
    pytest.mark.soak_on("connect"),
    pytest.mark.parametrize("spark", ["local[2]", "local-cluster", "connect"], indirect=True, scope="session"),
]


def stop() -> int:
    secret = 40 + lagom.rank()
    breakpoint()
    return {40: 40}[secret]  # only rank 0 has it


@pytest.mark.soak  # tests/extensions/observe/debugger shows it by default over the same channel
def test_a_breakpoint_stops_and_the_rank_goes_on(spark: Any, person: Person, capfd: pytest.CaptureFixture[str]) -> None:
    person.types("p 'secret', secret", "c", "c", "p 'failed', secret", "q")
    assert programs.run(stop, 1).value == 40
    with pytest.raises(KeyError, match="41"):
        programs.run(stop, 2, debug=1)
    shown = capfd.readouterr()
    assert "('secret', 40)" in shown.out
    assert "('failed', 41)" in shown.out
    assert "rank 1 of 2 has failed, and is in the debugger" in shown.err
    person.types("q")
    with pytest.raises(LagomError, match=r"^the run was ended from the debugger, on rank 0 at test_debugger"):
        programs.run(stop, 2)
    assert programs.run(lagom.rank, 2).per_rank == (0, 1)
