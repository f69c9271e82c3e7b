"""Messages between a search and its slots; see ``wire/messages.py`` for the columns.

===========  =======  ========================================================
message      sent by  handled by
===========  =======  ========================================================
SlotJoin     host     TrialLoop, past LocalSlots and SparkSlots
RunTrial     driver   serve_trials; inline: InlineSlots
BeginTrial   host     wait_for_trial
TrialValue   rank     TrialLoop
TrialAnswer  driver   Trial, past InlineSlots
TrialReport  rank     TrialLoop, past serve_trials and _report
OutcomePart  host     TrialLoop
TrialEnded   host     TrialLoop
SearchOver   driver   serve_trials
===========  =======  ========================================================
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lagom.wire.messages import CommonAnswer, CommonQuestion, Join, Message, RankReport


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotJoin(Join, tag="slot"):
    """A slot is ready for its first trial; ``task`` is its number."""

    sees_driver: bool
    """Whether the slot sees the driver's files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTrial(Message, tag="trial"):
    """Run a trial on the slot."""

    number: int
    change: str
    """Pickle, as base64, of the function that makes the trial's call from the call that all trials share."""
    metric: str
    """Name of the metric in the function's result."""
    threads: int
    """Threads of each rank; 0 keeps torch's default."""
    gpus: list[str]
    """As in ``Join``."""
    folder: str
    """The trial's folder; "" if the slot does not see the driver's files."""
    env: dict[str, str]
    """Environment variables for the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginTrial(Message, tag="begin trial"):
    """A rank that waits gets its trial; fields of the same name are as in ``RunTrial`` and ``RankSpec``."""

    number: int
    change: str
    metric: str
    env: dict[str, str]
    gpu: str | None
    gpu_index: int
    nccl: bool
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialValue(CommonQuestion, tag="report"):
    """A value of the metric while a trial runs; the rank waits for ``TrialAnswer``."""

    step: int
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialAnswer(CommonAnswer, tag="answer"):
    """The driver's answer to a value."""

    prune: bool
    """Whether the trial is to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialReport(RankReport, tag="trial outcome"):
    """How a rank of a trial has ended."""

    pruned: bool = False
    """Whether the rank has ended because the driver said so."""
    metric: float | None = None
    """None on a rank that has returned nothing, but rank 0."""
    samples: int = 0
    """Samples that the rank has trained on."""
    imports: list[str] = field(default_factory=list)
    """Modules of libraries that the trial has imported; they stay on the host."""

    @property
    def ends_others(self) -> bool:
        """See ``RankReport``: a rank that does not report would wait for this one."""
        return self.pruned


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomePart(Message, tag="part"):
    """A piece of what a trial leaves."""

    name: str
    """"outcome": the pickle of value or exception; "files": a tar of the files."""
    data: str
    """The bytes, as base64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEnded(Message, tag="ended", nested=("reports",)):
    """The trial of a slot has ended; its parts came before."""

    reports: list[RankReport]
    seconds: float
    problems: list[str]
    """Warnings for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOver(Message, tag="over"):
    """No further trial comes."""
