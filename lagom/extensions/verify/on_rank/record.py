"""``Record``: the data that a rank records in a rehearsal; the driver reads it without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Sketch: TypeAlias = tuple[float, ...]
"""A few signed sums of a tensor's elements, with a fixed sign for each place; the elements if there are at most 64.

The sketch of a difference is the difference of the sketches, and has about the norm of the difference: 64 sums mostly
give this norm to within 20%, and nearly always tell whether there is a difference.
"""


@dataclass(kw_only=True, slots=True)
class RecordedStep:
    """Records the loss and the gradients of one backward."""

    loss: float
    """Sum over the backward's roots on this rank, each times the gradient that the program gives for it."""
    weight: float
    """Weight of the loss on this rank: the average of weight times loss over the ranks is the loss of the batch."""
    gradients: dict[int, Sketch]
    """Sketches of gradients by number of the leaf, after the backward."""


@dataclass(kw_only=True, slots=True)
class RecordedLeaf:
    """Records a trained tensor: its name and kind, and sketches of its values at start and end."""

    name: str
    shape: tuple[int, ...]
    is_parameter: bool
    is_data: bool
    """Whether it has a row for each of the rank's own samples, as the input of an adversarial attack has."""
    epsilon: float
    """Machine epsilon of the tensor's dtype, or of the coarser dtype that autocast computes in."""
    start: Sketch
    """Sketch before the first backward that reached the tensor; for a Parameter, the first one since it was made."""
    end: Sketch = ()


@dataclass(kw_only=True, slots=True)
class RecordedRead:
    """A number that the program read from a tensor: ``loss.item()``, ``float(loss)``, ``if loss < 0.1``."""

    place: str
    """File and line."""
    value: float
    step: int
    """Number of backwards begun by then."""
    decides: bool = False
    """Whether the program compared the number with something, and may so decide by it."""


@dataclass(kw_only=True, slots=True)
class RecordedBatch:
    """The part of one batch of a data loader that this rank saw."""

    number: tuple[int, int]
    """Numbers of the pass, and of the batch in the pass."""
    rows: tuple[bytes, ...]
    """A digest for each sample; empty if this rank has no sample of the batch."""
    shared: bool
    """Whether the batch is split, so that the other ranks have its other samples."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shape of a sample's row in each of its tensors."""


@dataclass(kw_only=True, slots=True)
class RecordedPass:
    """Records between which backwards one pass over a data loader ran, and whether its batches were split."""

    num_before: int
    """Number of runs of the autograd engine, of any kind, before the pass."""
    num_after: int | None = None
    """Number of runs of the autograd engine at the end of the pass; None if the pass did not reach its end."""
    is_dealt: bool = False
    """Whether the pass counted as training, and this rank saw only its share."""


@dataclass(slots=True)
class RehearsalProgress:
    """Progress of a rehearsal on this rank."""

    num_backwards: int = 0
    """Number of backwards so far."""


@dataclass(kw_only=True, slots=True)
class Record:
    """Records all that a rehearsal did on one rank, to be compared with another rehearsal."""

    steps: list[RecordedStep] = field(default_factory=list)
    leaves: dict[int, RecordedLeaf] = field(default_factory=dict)
    reads: list[RecordedRead] = field(default_factory=list)
    batches: list[RecordedBatch] = field(default_factory=list)
    passes: list[RecordedPass] = field(default_factory=list)
    num_samples: int = 0
    printed: str = ""
    notes: list[str] = field(default_factory=list)
    """Messages that lagom would have logged."""
    shared: bool = False
    """Whether the work was distributed over the ranks."""
    shards_itself: bool = False
    """Whether a data set gave this rank batches of its own."""
    returned: bool = False
    """Whether the function reached its end."""
    value: list[object] = field(default_factory=list)
    """The function's return value, flat: see ``flat`` in extensions/verify/on_rank/tensor_sketch.py."""
    error: str = ""
    """The exception's name and message, if the function failed."""
    died: bool = False
    """Whether the rank's process died before the end of the rehearsal."""
    seconds: float = 0.0
    num_before: int = 0
    """Number of backwards before the snapshot that was taken; 0 if none was."""
    without_snapshot: str = ""
    """The most frequent reason for which no snapshot could be taken when one was due."""
