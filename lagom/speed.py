"""``Speed``: the seconds of a training step by part, the estimated step of one process, and what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

TITLES = {
    "loading": "loading",
    "forward": "forward",
    "backward": "backward",
    "exchange": "exchange",
    "optimizer": "optimizer step",
    "own": "the program's own",
}
"""Parts of a step, in the order of a step, with their titles."""
_WORTH_SAYING_S = 1.0
"""Seconds of training from which a run ends with a line about its speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPart:
    """A part of a training step."""

    name: str
    """One of ``TITLES``."""
    seconds: float
    """Seconds of a step on rank 0."""
    divided: float = 0.0
    """Share of these seconds in which rank 0 did its part of work that ranks divide; the rest every rank repeats."""
    shared: float = 0.0
    """Share in which rank 0 waited for workers that load for all ranks."""

    def in_one_process(self, world_size: int) -> float:
        """Return the estimated seconds of this part on one process. See ``Speed.one_process_s``."""
        if self.name == "exchange" and world_size > 1:
            return 0.0
        return self.seconds * (1 + (world_size - 1) * self.divided)

    def how(self, world_size: int) -> str:
        """Return in words whether ranks divide this part or repeat it; "" with one rank."""
        if world_size == 1:
            return ""
        if self.name == "exchange":
            return "between ranks"
        if self.shared > 0.5:
            return "shared by all ranks"
        if self.divided >= 0.95:
            return "divided over the ranks"
        return f"{self.divided:.0%} divided, the rest repeated" if self.divided >= 0.05 else "repeated on every rank"


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Speed:
    """Parts of the time of a training step on rank 0; false if no step was timed."""

    world_size: int
    threads: int = 1
    """Threads with which rank 0 computed."""
    steps: int = 0
    """Number of steps that were timed, without the first ones."""
    parts: tuple[StepPart, ...] = ()
    """Parts of a step, without those that took no time; their sum is ``step_s``."""
    advice: tuple[str, ...] = ()
    """At most two sentences on what would help, the most helpful first."""

    def __bool__(self) -> bool:
        return self.steps > 0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(part.seconds for part in self.parts)

    @property
    def one_process_s(self) -> float:
        """Estimated seconds of the same step on one process.

        The estimate is R times the divided seconds, plus the repeated and the shared ones, without the exchange, for R
        ranks: sum over the parts of ``seconds * (1 + (R - 1) * divided)``. It assumes a process as fast as rank 0, with
        the same number of threads, although one process alone on a machine may compute with more. Work that lagom adds
        to a step (looking at arguments, cutting rows) counts as repeated.
        """
        return sum(part.in_one_process(self.world_size) for part in self.parts)

    def seconds_of(self, name: str) -> float:
        """Return the seconds of a part; 0 if it took no time."""
        return sum(part.seconds for part in self.parts if part.name == name)

    @property
    def is_worth_saying(self) -> bool:
        """Whether the steps took long enough for a line about them, and there is something to say."""
        took = self.step_s * self.steps
        return took >= _WORTH_SAYING_S and (self.world_size > 1 or bool(self.advice))

    def line(self) -> str:
        """Return one line about the step."""
        if not self:
            return "no training step was timed"
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        found = f"a step takes {duration(self.step_s)}"
        if self.world_size > 1:
            alone = f"{duration(self.one_process_s)} on one process of {threads}"
            found += f" on {self.world_size} ranks, by estimate {alone}"
        return f"{found}; {'; '.join(self.advice) or shares(self.parts)}"

    def __repr__(self) -> str:
        rows = [(TITLES[part.name], duration(part.seconds), part.how(self.world_size)) for part in self.parts]
        lines = [f"\n  {title}: {', '.join(filter(None, more))}" for title, *more in rows]
        return f"<{self.line()}{''.join(lines)}>"

    def as_json(self) -> dict[str, Any]:
        """Return the fields for the run's records, with the seconds of a step and of one process."""
        return {**asdict(self), "step_s": self.step_s, "one_process_s": self.one_process_s}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Speed:
        """Return the ``Speed`` of which ``value`` is the JSON."""
        fields = {name: value[name] for name in ("world_size", "threads", "steps")}
        parts = tuple(StepPart(**part) for part in value["parts"])
        return cls(**fields, parts=parts, advice=tuple(value["advice"]))


def shares(parts: Sequence[StepPart]) -> str:
    """Return the shares of the parts that take a tenth of the step or more, the largest first."""
    total = sum(part.seconds for part in parts)
    large = sorted((part for part in parts if part.seconds >= total / 10), key=lambda part: -part.seconds)
    return ", ".join(f"{part.seconds / total:.0%} {TITLES[part.name]}" for part in large)


def duration(seconds: float) -> str:
    """Return the seconds of a step as text, such as "1.25 s", "41 ms" or "380 us"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 100 else f"{seconds * factor:.0f} {unit}"
    raise AssertionError
