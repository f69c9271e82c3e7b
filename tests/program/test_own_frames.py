"""A program's error has the traceback that one process gives: lagom's frames are left out of it."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.errors import LagomError, RankTraceback
from lagom.program.own_frames import cut_own_frames
from tests.program.failing_programs import (
    no_checkpoint,
    no_file,
    no_graph,
    wrong_sample,
    wrong_sample_in_a_worker,
    wrong_shape,
    wrong_target,
)

HOME = str(Path(lagom.__file__).parent)


def frames(text: str) -> list[tuple[str, str]]:
    """Return file and function of each frame in a traceback, with those of workers and of causes."""
    return re.findall(r'File "(.*)", line \d+, in (.*)', text)


def failure(call: Callable[[], Any]) -> Exception:
    """Return the error that ``call`` ends with."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def failure_of_ranks(function: Callable[..., Any], launcher: Any = "local") -> Exception:
    ranks = 2 if launcher == "local" else 1
    config = TorchDistributedConfig(launcher=launcher, world_size=ranks, run_dir=None)
    return failure(lambda: experiment.lagom(function, config))


@pytest.fixture
def _own_signals() -> Iterator[None]:
    """Loaders with workers leave a handler behind in this process."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("_own_signals")
@pytest.mark.parametrize(
    "function",
    [
        *(wrong_target, wrong_sample),
        *(
            pytest.param(one, marks=pytest.mark.soak)
            for one in (wrong_sample_in_a_worker, no_checkpoint, wrong_shape, no_graph, no_file)
        ),
    ],
)
def test_the_traceback_is_that_of_one_process(function: Callable[[], None]) -> None:
    plain = frames("".join(traceback.format_exception(failure(function))))
    plain.remove((__file__, "failure"))
    error = failure_of_ranks(function)
    assert isinstance(error.__cause__, RankTraceback)
    assert frames(str(error.__cause__)) == plain


@pytest.mark.parametrize("launcher", ["local", "inline"])
def test_of_the_call_itself_one_frame_is_shown(launcher: str) -> None:
    error = failure_of_ranks(no_file, launcher)
    names = [part.name for part in traceback.extract_tb(error.__traceback__)]
    assert names[2:] == ["lagom", *(["no_file"] if launcher == "inline" else [])]


def raised_in_lagom(source: str, beneath: Callable[[], Any]) -> list[str]:
    """Return the functions in the traceback of ``patch``, which ``source`` defines in a file of lagom's."""
    space: dict[str, Any] = {"original": beneath, "LagomError": LagomError}
    exec(compile(source, str(Path(HOME, "patch.py")), "exec"), space)
    error = failure(space["patch"])
    cut_own_frames(error)
    return [part.name for part in traceback.extract_tb(error.__traceback__)][1:]


def test_frames_in_which_lagom_is_wrong_stay() -> None:
    assert raised_in_lagom("def patch():\n    inner()\ndef inner():\n    None.width", int) == ["patch", "inner"]
    assert raised_in_lagom("def patch():\n    assert original() == 1", int) == ["patch"]
    assert raised_in_lagom("def patch():\n    return {}[original()]", int) == ["patch"]


def test_frames_that_pass_on_or_refuse_are_left_out() -> None:
    assert raised_in_lagom("def patch():\n    return original('x')", int) == []
    assert raised_in_lagom("def patch():\n    raise LagomError('want another')", int) == []
    assert raised_in_lagom("def patch():\n    return original()", wrong_sample)[:1] == ["wrong_sample"]
