"""Messages of the debugger; see ``wire/messages.py`` for the columns, and Note [Stopped ranks] in rank_debugger.py.

===========  ===============  ==================================
message      sent by          handled by
===========  ===============  ==================================
DebugBegin   rank             DebugTerminal
DebugText    rank             DebugTerminal
DebugAnswer  driver, or host  RankDebugger
===========  ===============  ==================================

==========  =============  =============
event       put by         handled by
==========  =============  =============
DebugShown  DebugTerminal  DebugTerminal
==========  =============  =============
"""

from __future__ import annotations

from dataclasses import dataclass

from lagom.wire.messages import ForRank, LocalEvent, Message


class _OfDebugger(Message):
    """Base of the messages of a rank's debugger."""

    __slots__ = ()
    rank: int
    is_sure = True
    follows_output = True

    def unreachable(self) -> DebugAnswer:
        """See ``Message``."""
        return DebugAnswer(rank=self.rank, refused="the driver cannot be reached from its host before the run ends")


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugBegin(_OfDebugger, tag="debug begin"):
    """A rank asks for its turn at the prompt."""

    rank: int
    failed: bool
    """Whether the rank is at an exception, and not at a breakpoint."""
    consequence: bool
    """Whether the exception follows from the failure of another rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugText(_OfDebugger, tag="debug"):
    """Text of a rank's debugger."""

    rank: int
    step: str
    """"text": only show the text; "line": the text ends with a prompt, and the rank waits for a line; "quit": end the
    run, and the text is the place; "end": the rank's turn is over."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugAnswer(ForRank, tag="debug answer"):
    """Answers ``DebugBegin``, and the steps "line" and "quit"."""

    rank: int
    line: str = ""
    """The typed line; "" at the end of input, and for a turn."""
    refused: str = ""
    """Why the rank gets no turn or line, as the end of a sentence; "" if it does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugShown(LocalEvent):
    """A debugger's text, or the news whose turn it is, for the thread that shows the run."""

    task: int
    rank: int
    step: str
    """As in ``DebugText``, or "turn"."""
    text: str = ""
    failed: bool = False
    """With "turn", as in ``DebugBegin``."""
