"""``lagom.on_rank.process_settings``: what a program has set for its process holds on its ranks."""

from __future__ import annotations

import inspect
import linecache
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import lagom
from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.on_rank.process_settings import process_settings

_CELL = "<cell 7 of a notebook>"


@pytest.fixture
def set_here() -> Iterator[None]:
    """A process with settings of its own, put back afterwards."""
    printing, errors = numpy.get_printoptions(), numpy.geterr()
    root, mine = logging.getLogger(), logging.getLogger("mine")
    level, handler = root.level, logging.StreamHandler(sys.__stdout__)
    handler.setFormatter(logging.Formatter("{levelname} of {name}: {message}", style="{"))
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("medium")
        torch.set_printoptions(precision=2)
        torch.backends.cudnn.benchmark = True
        numpy.set_printoptions(precision=3)
        numpy.seterr(divide="ignore")
        root.addHandler(handler)
        mine.setLevel(logging.DEBUG)
        text = "def asked():\n    return 41 + 1\n"
        linecache.cache[_CELL] = (len(text), None, text.splitlines(keepends=True), _CELL)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "of no interest")
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_printoptions(profile="default")
        torch.backends.cudnn.benchmark = False
        numpy.set_printoptions(**printing)
        numpy.seterr(**errors)
        root.removeHandler(handler)
        root.setLevel(level)
        mine.setLevel(logging.NOTSET)
        del linecache.cache[_CELL]


def found(asked: Any) -> dict[str, Any]:
    """Return the settings that a function sees."""
    warnings.warn("of no interest", stacklevel=1)
    warnings.warn("this is", stacklevel=1)
    if lagom.rank() == 0:
        logging.getLogger("mine").debug("a word")
        logging.getLogger("other").debug("too much")
    return {
        "weights": torch.nn.Linear(2, 1).weight.dtype,
        "deterministic": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "tensor": repr(torch.tensor([1 / 3])),
        "cudnn": torch.backends.cudnn.benchmark,
        "array": repr(numpy.ones(1) / 3),
        "infinite": float(numpy.ones(1)[0] / numpy.zeros(1)[0]),
        "source": inspect.getsource(asked),
    }


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 2])  # two ranks show it
def test_ranks_are_set_as_the_program_is(set_here: None, world_size: int, capfd: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("def asked():\n    return 41 + 1\n", _CELL, "exec"), scope)
    hparams = {"asked": scope["asked"]}
    result = experiment.lagom(found, TorchDistributedConfig(launcher="local", world_size=world_size, hparams=hparams))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = found(scope["asked"])
    assert all(one == wanted for one in result.per_rank)
    assert wanted["weights"] == torch.float64
    out, err = capfd.readouterr()
    assert out.startswith("DEBUG of mine: a word\n")
    assert "too much" not in out
    assert "of no interest" not in err
    assert "this is" in err


@pytest.mark.parametrize("num", [pytest.param(1, marks=pytest.mark.soak), 2])  # two handlers show it
def test_loggers_say_each_line_as_often_as_here(num: int, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's loggers have handlers in each process that imports torch."""
    assert len(logging.getLogger("torch").handlers) == 1
    mine = logging.getLogger("mine")
    added = [logging.StreamHandler(sys.__stderr__) for _ in range(num)]

    def say() -> None:
        for name in ("torch", "torch._dynamo", "mine"):
            logging.getLogger(name).warning("from %s", name)

    for handler in added:
        mine.addHandler(handler)
    try:
        experiment.lagom(say, TorchDistributedConfig(launcher="local", world_size=2))
    finally:
        for handler in added:
            mine.removeHandler(handler)
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("lagom:")]
    assert [line.rpartition(" ")[2] for line in said] == ["torch", "torch._dynamo", *["mine"] * num]


def test_what_only_this_process_knows_does_not_travel(set_here: None) -> None:
    class Own(UserWarning):
        pass

    class Mine(logging.Formatter):
        pass

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Mine("%(message)s"))
    logger = logging.getLogger("mine")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Own)
            settings = process_settings()
            result = experiment.lagom(lambda: 5, TorchDistributedConfig(launcher="local", world_size=1))
    finally:
        logger.removeHandler(handler)
    assert result.value == 5
    assert settings["logging"]["loggers"]["mine"][3] == [("stderr", logging.NOTSET, None)]
    assert not any(action == "error" for action, *_ in settings["warnings"])
