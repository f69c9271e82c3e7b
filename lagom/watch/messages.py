"""Messages of the timeline and of pictures, and streams of lagom's output; the columns are as in ``wire/messages.py``.

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

OWN = "lagom"
"""Name of the stream with lagom's own messages on a rank, beside "stdout" and "stderr" of the program."""
OWN_NOTICE = "lagom notice"
"""Name of the stream with those of lagom's messages in which nothing is wrong."""


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
