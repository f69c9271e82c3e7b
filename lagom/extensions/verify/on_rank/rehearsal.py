"""``rehearse``: runs the program with short passes and an early end, and records its actions."""

from __future__ import annotations

import contextlib
import io
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.autograd
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lagom.extensions.verify.on_rank.record_in_progress import Enough, RecordInProgress
from lagom.extensions.verify.on_rank.scalar_reads import recorded_reads
from lagom.extensions.verify.on_rank.tensor_sketch import flat
from lagom.forward.rows.sliced_forward import SlicedRuns
from lagom.patching.replace import replaced
from lagom.run_state.leaves import Leaves, find_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from lagom.extensions.verify.on_rank.record import Record
    from lagom.session.session import Session


@contextmanager
def numbered_parameters() -> Iterator[Leaves]:
    """Number parameters in the order in which they are made, so that the numbers are equal on one rank and on many."""
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


@contextmanager
def kept_output() -> Iterator[io.StringIO]:
    """Keep the program's output in the context instead of showing it; yield the stream with standard output."""
    printed = _KeptText(1)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(_KeptText(2)):
        yield printed


def rehearse(
    session: Session, leaves: Leaves, function: Callable[[], Any], output: io.StringIO | None = None
) -> Record:
    """Call ``function`` for the length of a rehearsal, inside all patches; return the record.

    Args:
        leaves: has the numbers of the parameters.
        output: from ``kept_output``, if that has begun already.

    Raises:
        BaseException: the function's error, if there are other ranks, which may wait for this one; but not an error of
            the type with which one process ended.
    """
    rehearsal = session.plan.rehearsal
    assert rehearsal is not None
    started = time.monotonic()
    with ExitStack() as stack:
        printed = stack.enter_context(kept_output()) if output is None else output
        if rehearsal.other_threads:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
        notes = RecordInProgress(session, rehearsal, leaves, printed)
        if (snapshots := session.parts.get("resume")) is not None:
            notes.join(snapshots)
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", _backward(notes)))
        stack.enter_context(replaced(torch.autocast, "__enter__", _entered(notes)))
        stack.enter_context(replaced(_BaseDataLoaderIter, "__next__", _following(notes)))
        stack.enter_context(replaced(SlicedRuns, "run", _slicing(notes)))
        stack.enter_context(recorded_reads(session, notes.read))
        # A checkpoint may hold numbers that were read; see Number.__reduce_ex__.
        stack.enter_context(torch.serialization.safe_globals([float]))
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


class _KeptText(io.StringIO):
    """A text stream that keeps its text; bytes written directly to the file are not shown in a rehearsal."""

    encoding = "utf-8"

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def fileno(self) -> int:
        return self._number


def _backward(notes: RecordInProgress) -> Callable[..., Any]:
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
        loss, weight = _loss(outputs, args[0]), session.backwards.loss_weights.common_weight(outputs, session.weight)
        notes.depth += 1
        try:
            result = original(outputs, *args, **options)
        finally:
            notes.depth -= 1
        notes.step(loss, session.weight if weight is None else weight, leaves)
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


def _entered(notes: RecordInProgress) -> Callable[..., Any]:
    original = vars(torch.autocast)["__enter__"]

    def enter(self: Any) -> Any:
        if getattr(self, "_enabled", True) and (dtype := getattr(self, "fast_dtype", None)) is not None:
            notes.epsilon = max(notes.epsilon, torch.finfo(dtype).eps)
        return original(self)

    return enter


def _slicing(notes: RecordInProgress) -> Callable[..., Any]:
    original = vars(SlicedRuns)["run"]

    def slicing(self: Any, *args: Any) -> Any:
        notes.record.shared = notes.record.shared or torch.is_grad_enabled()
        return original(self, *args)

    return slicing


def _following(notes: RecordInProgress) -> Callable[..., Any]:
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
