"""``rehearse``: runs the program with short passes and an early end, and records its actions."""

from __future__ import annotations

import contextlib
import io
import os
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lagom.patching.replace import replaced
from lagom.row_split.sliced_forward import SlicedRuns
from lagom.run_state.leaves import Leaves, find_leaves
from lagom.verify.on_rank.record import Record, RecordedBatch, RecordedLeaf, RecordedPass, RecordedRead, RecordedStep
from lagom.verify.on_rank.scalar_reads import recorded_reads
from lagom.verify.on_rank.tensor_sketch import digests, flat, row_shapes, sketch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from lagom.plan import Rehearsal
    from lagom.session.session import Session


_MAY_END = (8, 24)
"""Backwards after which a rehearsal that takes too long ends."""


_MOST_ENDS = 1000
"""Times that a program may catch even ``Enough``, and continue."""


class Enough(BaseException):
    """Ends the program; its own ``except Exception`` does not catch this."""


@contextmanager
def numbered_parameters() -> Iterator[Leaves]:
    """Number parameters as they are made, equally on one rank and on many, apart from the patches' numbers."""
    leaves = Leaves()
    with ExitStack() as stack:
        for kind in (nn.Parameter, UninitializedParameter):
            make = kind.__new__

            def patched(cls: type, *args: Any, _make: Any = make, **kwargs: Any) -> Tensor:
                parameter: Tensor = _make(cls, *args, **kwargs)
                leaves.add_leaf(parameter)
                return parameter

            stack.enter_context(replaced(kind, "__new__", staticmethod(patched)))
        yield leaves


def rehearse(session: Session, leaves: Leaves, function: Callable[[], Any]) -> Record:
    """Call ``function`` for the length of a rehearsal; inside all patches.

    Args:
        leaves: has the numbers of the parameters.

    Raises:
        Exception: the function's error, if there are other ranks: they may wait for this one.
    """
    rehearsal = session.plan.rehearsal
    assert rehearsal is not None
    notes = _Notes(session, rehearsal, leaves)
    printed = _Kept(1)
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", _backward(notes)))
        stack.enter_context(replaced(torch.autocast, "__enter__", _entered(notes)))
        stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", _following(notes)))
        stack.enter_context(replaced(SlicedRuns, "run", _slicing(notes)))
        stack.enter_context(recorded_reads(session, notes.read))
        # A checkpoint may hold numbers that were read; see Number.__reduce_ex__.
        stack.enter_context(torch.serialization.safe_globals([float]))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(_Kept(2)))
        record = notes.record
        try:
            value = function()
            record.returned, record.value = True, flat(value)
        except Enough:
            pass
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                record.returned = True  # the usual end of a script
            elif session.world_size > 1 and type(error).__name__ != rehearsal.expected:
                raise
            else:
                record.error = f"{type(error).__name__}: {error}"
    notes.finish()
    record.printed, record.seconds = printed.getvalue(), time.monotonic() - started
    return record


class _Kept(io.StringIO):
    """A text stream that keeps its text; bytes written directly to the file are not shown in a rehearsal."""

    encoding = "utf-8"

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def fileno(self) -> int:
        return self._number


class _Notes:
    """The record in progress."""

    def __init__(self, session: Session, rehearsal: Rehearsal, leaves: Leaves) -> None:
        self.session = session
        self.rehearsal = rehearsal
        self.record = Record()
        self._leaves = leaves
        self.epsilon = 0.0
        self.begun = 0
        self.num_enough = 0
        self.num_runs = 0
        """Number of runs of the engine: backwards, and gradients that the program requests."""
        self.depth = 0
        self._kept: dict[int, Tensor] = {}  # the program may have dropped them by the end
        self._deadline = None if rehearsal.seconds is None else time.monotonic() + rehearsal.seconds

    def begin(self) -> None:
        """Count a backward that is about to begin."""
        is_late = self.begun in _MAY_END and self._deadline is not None and time.monotonic() > self._deadline
        if is_late or self.begun >= self.rehearsal.num_backwards:
            self.num_enough += 1
            if self.num_enough > _MOST_ENDS:
                os._exit(1)
            raise Enough
        self.begun += 1
        self.session.num_rehearsed = self.begun

    def starts(self, leaves: Sequence[Tensor]) -> list[int]:
        """Return the numbers of ``leaves``; record these and all parameters the first time that they are seen.

        All parameters, since other ranks may reach others: a branch on the data, a mixture of experts.
        """
        for leaf in self._leaves.alive():
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad and not is_lazy(leaf):
                self._start(leaf)
        return [self._start(leaf) for leaf in leaves]

    def _start(self, leaf: Tensor) -> int:
        number = self._leaves.number(leaf)
        if number not in self._kept:
            self._kept[number] = leaf
            share = None if isinstance(leaf, nn.Parameter) else self.session.passes.share
            self.record.leaves[number] = RecordedLeaf(
                name=self._name(number, leaf),
                shape=tuple(leaf.shape),
                is_parameter=isinstance(leaf, nn.Parameter),
                is_data=share is not None and leaf.dim() > 0 and leaf.shape[0] == max(share.num_mine, 1),
                epsilon=max(torch.finfo(leaf.dtype).eps, self.epsilon),
                start=sketch(leaf),
            )
        return number

    def _name(self, number: int, leaf: Tensor) -> str:
        name = self.session.modules.name_of(leaf)
        return name.removeprefix("the parameter ") if "parameter" in name else f"tensor {number} {tuple(leaf.shape)}"

    def step(self, loss: float, weight: float, reached: list[int]) -> None:
        """Record the end of a backward that reached these leaves."""
        wanted = dict.fromkeys(reached) | dict.fromkeys(
            n for n, leaf in self.record.leaves.items() if leaf.is_parameter
        )
        held = {number: self._kept[number].grad for number in wanted}
        gradients = {number: sketch(gradient) for number, gradient in held.items() if gradient is not None}
        self.record.steps.append(RecordedStep(loss=loss, weight=weight, gradients=gradients))

    def read(self, place: str, value: float) -> RecordedRead:
        """Record a number that the program reads."""
        read = RecordedRead(place=place, value=value, step=self.begun)
        self.record.reads.append(read)
        return read

    def batch(self, iterator: Any, data: Any) -> None:
        """Record a batch that the program sees."""
        current = vars(iterator).get("_lagom_pass")
        training, shared = bool(getattr(current, "training", False)), bool(getattr(current, "sharded", False))
        number = self._pass(iterator)
        number[1] += 1
        self.record.passes[number[0]].is_dealt = training and shared
        share = getattr(current, "current", None) if training else None
        rows, shapes = ((), ()) if share is not None and share.num_mine == 0 else (digests(data), row_shapes(data))
        self.record.batches.append(
            RecordedBatch(number=(number[0], number[1] - 1), rows=rows, shared=shared, shapes=shapes)
        )
        self.record.shared = self.record.shared or (shared and training)
        self.record.shards_itself = self.record.shards_itself or bool(getattr(current, "own", False))

    def _pass(self, iterator: Any) -> list[int]:
        """Return the number of the iterator's pass, and of its batches so far."""
        state: dict[str, Any] = vars(iterator)
        current = state.get("_lagom_pass")
        # A loader with persistent workers has one iterator for all its passes.
        if "_lagom_rehearsed" not in state or state["_lagom_rehearsed"][0] is not current:
            state["_lagom_rehearsed"] = (current, [len(self.record.passes), 0])
            self.record.passes.append(RecordedPass(num_before=self.num_runs))
        number: list[int] = state["_lagom_rehearsed"][1]
        return number

    def end(self, iterator: Any) -> None:
        """Record the end of a pass."""
        self.record.passes[self._pass(iterator)[0]].num_after = self.num_runs

    def finish(self) -> None:
        """Record the final state."""
        for number, leaf in self.record.leaves.items():
            leaf.end = sketch(self._kept[number])
        self.record.num_samples = self.session.samples_trained
        self.record.notes = sorted(self.session.said)


def _backward(notes: _Notes) -> Callable[..., Any]:
    original = torch.autograd._engine_run_backward
    session = notes.session

    def run_backward(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
        if not session.live or notes.depth:
            return original(outputs, *args, **options)
        notes.num_runs += 1
        if not options.get("accumulate_grad", False):
            notes.starts([leaf for leaf in args[3] if isinstance(leaf, nn.Parameter)])
            return original(outputs, *args, **options)
        notes.begin()
        leaves = notes.starts(find_leaves(outputs, args[3]))
        loss, weight = _loss(outputs, args[0]), session.weight
        notes.depth += 1
        try:
            result = original(outputs, *args, **options)
        finally:
            notes.depth -= 1
        notes.step(loss, weight, leaves)
        return result

    return run_backward


def _loss(outputs: Sequence[Any], gradients: Sequence[Tensor | None]) -> float:
    total = 0.0
    with torch.no_grad():
        for output, gradient in zip(outputs, gradients, strict=False):
            if isinstance(output, torch.Tensor):
                value = output.detach() if gradient is None else output.detach() * gradient.detach()
                total += torch.Tensor.item(value.real.to(torch.float64).sum())
    return float(total)


def _entered(notes: _Notes) -> Callable[..., Any]:
    original = vars(torch.autocast)["__enter__"]

    def enter(self: Any) -> Any:
        if getattr(self, "_enabled", True) and (dtype := getattr(self, "fast_dtype", None)) is not None:
            notes.epsilon = max(notes.epsilon, torch.finfo(dtype).eps)
        return original(self)

    return enter


def _slicing(notes: _Notes) -> Callable[..., Any]:
    original = vars(SlicedRuns)["run"]

    def slicing(self: Any, *args: Any) -> Any:
        notes.record.shared = notes.record.shared or torch.is_grad_enabled()
        return original(self, *args)

    return slicing


def _following(notes: _Notes) -> Callable[..., Any]:
    original = vars(_BaseDataLoaderIter)["__next__"]

    def following(self: Any) -> Any:
        try:
            data = original(self)
        except StopIteration:
            if notes.session.live:
                notes.end(self)
            raise
        if notes.session.live:
            notes.batch(self, data)
        return data

    return following
