"""Expected results of each program with ``batches="split"``; with "whole", all equal the plain run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Outcome = Literal["equal", "by share", "off", "apart", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A program, called in one way, and how it fares when each rank sees its share of a batch."""

    program: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    split: Outcome = "equal"
    """``equal``: weights, result and files are those of one process, to 1e-12.

    ``by share``: they are those of one process whose criterion is the weighted mean of what it is on the shares.
    ``off``: the ranks agree, but their numbers are not those of one process.
    ``apart``: the ranks have numbers of their own, and are warned of it.
    ``error``: the ranks cannot go on, and say why.
    """
    why: str = ""
    """Reason for a difference; for an error or a warning, a part of its text."""
    prints: Literal["equal", "own"] = "equal"
    """``own``: rank 0 prints numbers of its own share, such as a running loss, in the same words."""
    says: Literal["", "a mean with weights of its own", "a sum over a batch"] = ""
    """Part of the warning about the loss."""
    shared: bool = True
    """Whether there is a loader to share out; without one every rank does all of the work, and all is equal."""

    def __str__(self) -> str:
        return "-".join([self.program, *(f"{key}={value}" for key, value in self.options.items())])


_DRAWS = "draws random numbers for a share that one process draws for the batch"
_WEIGHTED: Final = "a mean with weights of its own"
_SUMMED: Final = "a sum over a batch"

CASES = (
    Case(program="accumulation"),
    Case(program="activation_map", prints="own"),
    Case(program="actor_critic", prints="own"),
    Case(program="adversarial", split="off", why=_DRAWS, prints="own"),
    Case(program="attacked", options={"sign": True}),
    Case(program="attacked", options={"sign": False}, split="off", why="the gradient by a sample is that of its share"),
    Case(program="attention", split="off", why=_DRAWS, prints="own"),
    Case(program="auxiliary", prints="own"),
    Case(program="averaging"),
    Case(program="balanced", split="by share", why="the mean is over the weights of the classes", says=_WEIGHTED),
    Case(program="bridged", split="off", why="attention is within the share", prints="own"),
    Case(program="carried", split="error", why="Expected hidden"),
    Case(program="checkpointed", options={"dropout": 0.0}, prints="own"),
    Case(program="checkpointed", options={"dropout": 0.2}, split="off", why=_DRAWS, prints="own"),
    Case(program="clamped"),
    Case(program="codebook", split="off", why="a buffer follows rank 0, which sees its share only"),
    Case(program="convolution"),
    Case(program="counting", split="off", why=_DRAWS, prints="own"),
    Case(program="data_parallel"),
    Case(program="detection"),
    Case(program="dict_through", prints="own"),
    Case(program="diffusion", split="off", why=_DRAWS, prints="own"),
    Case(program="distillation"),
    Case(program="doubled"),
    Case(program="dream", shared=False),
    Case(program="early_stopping"),
    Case(program="endless"),
    Case(program="experts"),
    Case(program="exported"),
    Case(program="extracted"),
    Case(program="finetuned"),
    Case(program="folds"),
    Case(program="functional", split="apart", why="without a backward(", prints="own"),
    Case(program="graph", shared=False),
    Case(program="hardest", split="by share", why="the hardest are those of the share"),
    Case(program="hooked", prints="own"),
    Case(program="ignored", split="by share", why="the mean is over the tokens of the batch", says=_WEIGHTED),
    Case(program="inplace", prints="own"),
    Case(program="journal"),
    Case(program="language", shared=False),
    Case(program="layer_local", prints="own"),
    Case(program="line_search"),
    Case(program="line_search", options={"search": "strong_wolfe"}, split="error", why="DivergenceError"),
    Case(program="loss_inside", prints="own"),
    Case(program="meta", shared=False),
    Case(program="metric", split="by share", why="negatives are those of the share"),
    Case(program="mixup", split="off", why=_DRAWS, prints="own"),
    Case(program="named", prints="own"),
    Case(program="noise", options={"by_weights": False}, split="off", why=_DRAWS, prints="own"),
    Case(program="noise", options={"by_weights": True}, split="off", why=_DRAWS, prints="own"),
    Case(program="packed"),
    Case(program="penalty"),
    Case(program="policy", shared=False),
    Case(program="polynomial", shared=False),
    Case(program="private", split="error", why="DivergenceError"),
    Case(program="quasi_newton", shared=False),
    Case(program="renormed", split="error", why="DivergenceError"),
    Case(program="replay", shared=False),
    Case(program="resumed"),
    Case(program="scaled"),
    Case(program="sharpness"),
    Case(program="siamese", split="off", why="each rank's data set draws for itself", prints="own"),
    Case(program="sparse"),
    Case(program="spectral"),
    Case(program="staged", split="off", why="the mean is that of the share", prints="own"),
    Case(program="stateful", prints="own"),
    Case(
        program="sums",
        split="by share",
        why="a sum over a share is smaller than one over the batch",
        prints="own",
        says=_SUMMED,
    ),
    Case(program="switch", split="off", why="ranks take other ways", prints="own"),
    Case(program="tied"),
    Case(program="time_first", prints="own"),
    Case(program="translation", options={"batch_size": 6}, prints="own"),
    Case(program="translation", options={"batch_size": 7}, prints="own"),
    Case(program="two_losses"),
    Case(program="uncertainty", split="off", why=_DRAWS),
    Case(program="until", split="error", why="DivergenceError"),
    Case(program="variational", split="off", why=_DRAWS, prints="own", says=_SUMMED),
)

WITH_EVALUATION = ("convolution", "early_stopping", "siamese", "sums", "uncertainty", "variational")
"""Programs whose evaluations tell how they are run."""
RATHER_WHOLE = ("adversarial", "codebook", "convolution", "inplace", "meta", "noise", "stateful")
"""Programs that are run on whole batches also without slicing what does not pay."""
IN_EVERY_WAY = ("balanced", "codebook", "convolution", "sums")
"""Programs that by default run in every way: with "split" they are equal, by share or off.

The others run in one, and with ``pytest -m soak`` in every way too.
"""
AS_OTHERS = (
    *("accumulation", "activation_map", "attacked-sign=False", "attacked-sign=True", "carried", "counting"),
    *("diffusion", "doubled", "extracted", "ignored", "language", "layer_local", "loss_inside", "metric", "policy"),
    *("quasi_newton", "siamese", "time_first", "translation-batch_size=7", "variational"),
)
"""Cases that test nothing which another program does not test by default; they run only with ``-m soak``.

The other program is in this folder or in ``short``.
"""
SHARED_BY_THREE = (
    *("accumulation", "averaging", "carried", "codebook", "convolution", "detection", "early_stopping", "endless"),
    *("experts", "folds", "functional", "ignored", "journal", "line_search", "packed", "penalty", "resumed"),
    *("siamese", "stateful", "sums", "tied", "translation", "two_losses", "variational"),
)
"""Programs for which three ranks may differ from two: uneven or empty shares, sums in another order, state, files.

These run on three ranks, the other programs on two; on the other number all run with ``pytest -m soak``.
"""
AS_SCRIPTS = ("journal", "language", "sums")
"""Programs that also run as scripts: one each that writes files, saves a module, and needs "whole".

A script only parses arguments, calls ``train`` and saves its result; the others run with ``pytest -m soak``.
"""
DISTRIBUTED = ("parallel",)
"""Programs that are distributed already; see ``test_distributed.py``."""
