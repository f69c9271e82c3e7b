"""``RecordInProgress``: the record of a rehearsal on one rank while the rehearsal goes on."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lagom.extensions.verify.on_rank.record import (
    Record,
    RecordedBatch,
    RecordedLeaf,
    RecordedPass,
    RecordedRead,
    RecordedStep,
)
from lagom.extensions.verify.on_rank.tensor_sketch import digests, row_shapes, sketch

if TYPE_CHECKING:
    import io
    from collections.abc import Sequence

    from torch import Tensor

    from lagom.extensions.resume.snapshot_taker import Snapshots
    from lagom.extensions.verify.on_rank.rehearsed_snapshot import RehearsedSnapshot
    from lagom.plan import Rehearsal
    from lagom.run_state.leaves import Leaves
    from lagom.session.session import Session

_MAY_END = (8, 24)
"""The time limit is checked only after these numbers of backwards: a rehearsal that is late ends there."""


_MOST_ENDS = 1000
"""Number of times that a program may catch ``Enough`` and go on, before its process is ended."""


class Enough(BaseException):
    """Ends the program; its own ``except Exception`` does not catch this."""


class RecordInProgress:
    """The record of a rehearsal, to which the patches of ``rehearse`` add.

    Args:
        leaves: has the numbers of the parameters.
        printed: the text of standard output.
    """

    def __init__(self, session: Session, rehearsal: Rehearsal, leaves: Leaves, printed: io.StringIO) -> None:
        self.session = session
        self.rehearsal = rehearsal
        self.record = Record()
        self._leaves = leaves
        self._printed = printed
        self.epsilon = 0.0
        self.begun = 0
        self.num_enough = 0
        self.num_runs = 0
        """Number of runs of the engine: backwards, and gradients that the program requests."""
        self.depth = 0
        self._kept: dict[int, Tensor] = {}  # the program may have dropped them by the end
        self._deadline = None if rehearsal.seconds is None else time.monotonic() + rehearsal.seconds

    def join(self, snapshots: Snapshots) -> None:
        """Let ``snapshots`` keep the record so far; if this process goes on from a snapshot, restore its record."""
        snapshots.program.beside = self._state
        if (state := snapshots.program.found_beside) is None:
            return
        record, (known, following), self.begun, self.num_runs, self.epsilon, printed = state
        self._leaves.restore(known, following)
        self._kept = {number: known[number] for number in record.leaves}
        self.record = record
        self.session.parts["verify"].num_backwards = self.begun
        self._printed.write(printed)

    def _state(self) -> tuple[Any, ...]:
        known, following = self._leaves.state()
        leaves = self._kept | known, following
        return self.record, leaves, self.begun, self.num_runs, self.epsilon, self._printed.getvalue()

    def begin(self) -> None:
        """Count a backward that is about to begin; raise ``Enough`` if the rehearsal ends here."""
        is_late = self.begun in _MAY_END and self._deadline is not None and time.monotonic() > self._deadline
        if is_late or self.begun >= self.rehearsal.num_backwards:
            self.num_enough += 1
            if self.num_enough > _MOST_ENDS:
                os._exit(1)
            raise Enough
        self.begun += 1
        self.session.parts["verify"].num_backwards = self.begun

    def starts(self, leaves: Sequence[Tensor]) -> list[int]:
        """Return the numbers of ``leaves``; record these and all trained parameters the first time that they are seen.

        All parameters are recorded, since another rank may reach other ones: by a branch on the data, or in a mixture
        of experts.
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
        name = self.session.tensors.modules.name_of(leaf)
        return name.removeprefix("the parameter ") if "parameter" in name else f"tensor {number} {tuple(leaf.shape)}"

    def step(self, loss: float, weight: float, reached: list[int]) -> None:
        """Record the end of a backward; ``reached`` has the numbers of the leaves that it reached."""
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
        training, shared = bool(getattr(current, "training", False)), bool(getattr(current, "is_split", False))
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
        self.record.num_samples = self.session.progress.samples_trained
        self.record.notes = sorted(self.session.said)
        snapshots: RehearsedSnapshot | None = self.session.parts.get("resume")
        if snapshots is not None:
            self.record.num_before = snapshots.num_before
            self.record.without_snapshot = snapshots.without
