"""Messages of the timeline and of the program's pictures; see ``wire/messages.py`` for the columns.

========  =======  =====================================================
message   sent by  handled by
========  =======  =====================================================
Timeline  rank     RunDisplay, past RankSupervisor and fitting_timelines
Picture   rank     RunDisplay, past RankSupervisor; search: TrialLoop
========  =======  =====================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from lagom.wire.messages import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline(Message, tag="timeline"):
    """Spans of a rank's timeline."""

    rank: int
    data: str
    """The spans, for ``unpack_spans``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture(Message, tag="picture"):
    """A picture that the program has shown."""

    rank: int
    png: str
    """The file, as base64."""
