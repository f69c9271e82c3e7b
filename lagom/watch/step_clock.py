"""``StepClock``: divides the time of a rank's training steps among their parts. See Note [Parts of a step]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import NamedTuple

(
    OUTSIDE,
    OWN,
    LOADING,
    LOADING_DIVIDED,
    LOADING_SHARED,
    FORWARD,
    FORWARD_DIVIDED,
    BACKWARD,
    BACKWARD_DIVIDED,
    EXCHANGE,
    OPTIMIZER,
    OPTIMIZER_DIVIDED,
) = range(12)
"""Parts to which time belongs. ``OUTSIDE`` is the time outside of steps, ``OWN`` the program's own code; "divided" is
work that ranks divide, "shared" the wait for workers that serve all ranks, and the rest is repeated on every rank."""
LOADING_PARTS = {"repeated": LOADING, "divided": LOADING_DIVIDED, "shared": LOADING_SHARED}
"""Part for each value of ``LoaderPass.loading``."""
_NUM_PARTS = 12
_MARKS = frozenset((1, 2, 4, 8, 16))
"""Numbers of steps after which the seconds so far are kept, so that the first steps can be left out."""
_ALL, _EVERY = 256, 7
"""Number of first steps that are all timed, and how many later steps there are for each that is timed. The number is
prime, so that a program that does more every 10 or 100 steps is not timed just then."""


class StepSeconds(NamedTuple):
    """Mean seconds of a step by part, over ``steps`` steps; the index is that of the part."""

    steps: int
    seconds: tuple[float, ...]


class StepClock:
    """Tells to which part of a step the time belongs that passes now. The thread that makes it is the one it times."""

    __slots__ = (
        *("_has_worked", "_is_timed", "_marks", "_num_ended", "_reads_batches", "_since", "_thread", "_whole"),
        *("part", "seconds", "steps"),
    )

    def __init__(self) -> None:
        self.part = OUTSIDE
        """Part to which the time belongs that passes now."""
        self._thread = get_ident()
        self._since = 0.0
        self._reads_batches = False
        self._reset()

    def _reset(self) -> None:
        self.seconds = [0.0] * _NUM_PARTS
        """Seconds of all steps so far, by part."""
        self.steps = 0
        """Number of timed steps that have ended."""
        self._num_ended, self._is_timed = 0, True
        self._has_worked = False
        """Whether a backward ran in the step that is under way."""
        self._marks = {0: self.seconds.copy()}
        self._whole = self.seconds.copy()
        """Seconds until the end of the last step that has ended, in a program that reads no batches."""

    def switch(self, part: int) -> int:
        """Let the time from now on belong to ``part``, and return the part before, to which the caller switches back.

        Outside of steps, and in other threads, the time belongs to no part.
        """
        before = self.part
        if before and get_ident() == self._thread:
            now = perf_counter()
            self.seconds[before] += now - self._since
            self._since, self.part = now, part
        return before

    def rename(self, part: int) -> None:
        """Let the time since the last switch, and from now on, belong to ``part``."""
        if self.part and get_ident() == self._thread:
            self.part = part

    @contextmanager
    def during(self, part: int) -> Iterator[None]:
        """Context manager in which the time belongs to ``part``."""
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    def divide_backward(self, is_divided: bool) -> None:
        """Let the time of the backward that runs belong to work that ranks divide, or repeat, from now on."""
        if self.part in (BACKWARD, BACKWARD_DIVIDED):
            self.switch(BACKWARD_DIVIDED if is_divided else BACKWARD)

    def ask(self, part: int) -> float:
        """Begin a step, as the program asks for a training batch; end the step before. Return the time.

        Args:
            part: the part of loading; ``OUTSIDE`` if the batch is none for training, which begins no step.
        """
        now = perf_counter()
        if get_ident() == self._thread:
            if self.part:
                self.seconds[self.part] += now - self._since
            if self._has_worked:
                self._end_step()
            if part and not self._reads_batches:
                self._reads_batches = True
                self._reset()
            self._since, self.part = now, part if self._is_timed else OUTSIDE
        return now

    def give(self, *, counts: bool) -> float:
        """Let the time belong to the program, which gets its batch now; return the time.

        Args:
            counts: whether the step counts without a backward, as on one rank, where backwards are not patched.
        """
        now = perf_counter()
        if get_ident() == self._thread:
            self._has_worked = self._has_worked or counts
            if self.part:
                self.seconds[self.part] += now - self._since
                self._since, self.part = now, OWN
        return now

    def begin_backward(self, part: int) -> int:
        """Switch to ``part``, as an outermost backward begins; in a program without batches, begin a step."""
        if self._reads_batches:
            self._has_worked = True
        elif get_ident() == self._thread:
            self._begin_by_backward()
        return self.switch(part)

    def _begin_by_backward(self) -> None:
        if self._has_worked:
            self.switch(OWN)
            self._end_step()
            self._whole = self.seconds.copy()
        self._has_worked = True
        if not self._is_timed:
            self.part = OUTSIDE
        elif not self.part:
            self._since, self.part = perf_counter(), OWN

    def _end_step(self) -> None:
        """End a step, timed or not, and decide whether the next one is timed."""
        self._has_worked = False
        self._num_ended += 1
        if self._is_timed:
            self.steps += 1
            if self.steps in _MARKS:
                self._marks[self.steps] = self.seconds.copy()
        self._is_timed = self._num_ended < _ALL or self._num_ended % _EVERY == 0

    def end(self) -> None:
        """End the steps, as the program has returned."""
        if self._reads_batches:
            self.ask(OUTSIDE)
        self.part = OUTSIDE

    def mean(self) -> StepSeconds:
        """Return the mean seconds of a step, without the first 16 steps, or without up to half of fewer than 32."""
        first = max(number for number in self._marks if 2 * number <= self.steps)
        steps, last = self.steps - first, self.seconds if self._reads_batches else self._whole
        if not steps:
            return StepSeconds(0, (0.0,) * _NUM_PARTS)
        pairs = zip(last, self._marks[first], strict=True)
        return StepSeconds(steps, tuple((after - before) / steps for after, before in pairs))


# Note [Parts of a step]
#
# A step begins when the program asks for a batch of a training pass, and ends when it asks for the next batch, or for
# one of an evaluation, or when the pass has ended. It counts if a backward ran in it. In a program that reads no
# batches, a step is the time from the beginning of one backward to the beginning of the next. So a step has no
# evaluation between epochs in it, and no start of a pass.
#
# At each moment the time belongs to exactly one part, the innermost: an exchange in a backward is no backward. So the
# parts' sum is the time of the step. A change of part is one read of the clock. Outside of steps, and in other threads
# (a backward on a GPU, exchanges that overlap with a backward), nothing is read.
#
# A step of a small model takes some hundreds of microseconds, and a change of part 0.2. So from the 256th step on
# every seventh step is timed. In the others a change of part is a test of a number.
#
# The first steps hold examinations of modules, the growth of memory and the compilation of kernels, so they are left
# out where there are enough others.
