"""What a rank notes down in a rehearsal, as plain data that the driver reads without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Sketch: TypeAlias = tuple[float, ...]
"""A few sums of a tensor's elements, each with a sign that its place fixes: those of a difference are the difference
of theirs, and have about its norm (64 sums tell it to 20%, and a difference from none for certain)."""


@dataclass(kw_only=True, slots=True)
class RecordedStep:
    """One backward."""

    loss: float
    """Its roots, as this rank has them, added up."""
    weight: float
    """What they count on this rank: the average of weight times loss over the ranks is the loss of the batch."""
    gradients: dict[int, Sketch]
    """By number of the leaf, once the backward is over."""


@dataclass(kw_only=True, slots=True)
class RecordedLeaf:
    """A tensor that is trained."""

    name: str
    shape: tuple[int, ...]
    is_parameter: bool
    is_data: bool
    """It has a row for each of the rank's own samples: the input of an adversarial attack, say."""
    epsilon: float
    """Of its dtype, or of the coarser one that autocast computes in."""
    start: Sketch
    """Before the first backward that reached it."""
    end: Sketch = ()


@dataclass(kw_only=True, slots=True)
class RecordedRead:
    """A number that the program took out of a tensor: ``loss.item()``, ``float(loss)``, ``if loss < 0.1``."""

    place: str
    """File and line."""
    value: float
    step: int
    """Backwards begun by then."""
    decides: bool = False
    """It was compared with something."""


@dataclass(kw_only=True, slots=True)
class RecordedBatch:
    """What this rank saw of one batch of a data loader."""

    number: tuple[int, int]
    """Of the pass, and in the pass."""
    rows: tuple[bytes, ...]
    """A digest for each sample that counts."""
    shared: bool
    """The other ranks have the other samples."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of a sample's row in each of its tensors."""


@dataclass(kw_only=True, slots=True)
class RecordedPass:
    """One pass over a data loader."""

    num_before: int
    """Backwards, of whatever kind, that were run before it."""
    num_after: int | None = None
    """The same when it came to its end; None where it did not."""
    is_dealt: bool = False
    """It counted as training, and this rank saw its share."""


@dataclass(kw_only=True, slots=True)
class Record:
    """A rehearsal, as one rank saw it."""

    steps: list[RecordedStep] = field(default_factory=list)
    leaves: dict[int, RecordedLeaf] = field(default_factory=dict)
    reads: list[RecordedRead] = field(default_factory=list)
    batches: list[RecordedBatch] = field(default_factory=list)
    passes: list[RecordedPass] = field(default_factory=list)
    num_samples: int = 0
    printed: str = ""
    notes: list[str] = field(default_factory=list)
    """What lagom would have logged."""
    shared: bool = False
    """The work was shared out over the ranks."""
    shards_itself: bool = False
    """A data set gave this rank batches of its own."""
    returned: bool = False
    """The function came to its end."""
    value: list[object] = field(default_factory=list)
    """What it returned, flat: see ``flat`` in verify/on_rank/tensor_sketch.py."""
    error: str = ""
    """How it failed, if it did: the exception's name and message."""
    died: bool = False
    """Its process did not live to the end of the rehearsal."""
    seconds: float = 0.0
