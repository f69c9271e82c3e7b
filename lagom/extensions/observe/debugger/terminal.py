"""``DebugTerminal``: the driver's end of debuggers on ranks: whose turn it is, what they show, and what is typed."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from lagom.errors import LagomError
from lagom.extensions.observe.debugger.messages import DebugAnswer, DebugBegin, DebugShown, DebugText
from lagom.plan import Plan
from lagom.watch.notebook import notebook
from lagom.wire.messages import Hold, LocalEvent, Message
from lagom.wire.server import DriverServer

CHOSEN_S = 10.0
"""Seconds for the chosen rank to fail too, before another failed rank gets its turn."""
NOBODY = "nobody can type at the driver: its standard input is no terminal, and it is no notebook with input"


def can_type() -> bool:
    """Return whether somebody can type: standard input is a terminal, or this process is a notebook's."""
    with contextlib.suppress(AttributeError, ValueError):  # there is no standard input, or it is closed
        return notebook() is not None or sys.stdin.isatty()
    return False


class _Request(NamedTuple):
    """A rank that asks for its turn."""

    task: int
    begin: DebugBegin


class DebugTerminal:
    """Gives ranks their turns, one at a time, and holds the run meanwhile.

    See Note [Stopped ranks] in rank_debugger.py.

    Args:
        channel: the server of the run; all methods except ``show`` and ``close`` run in its thread.
        put: passes an event to the thread that shows the run, which calls ``show`` with it.
    """

    def __init__(self, plan: Plan, channel: DriverServer, put: Callable[[DebugShown], None]) -> None:
        self._plan, self._channel, self._put = plan, channel, put
        self._turns: list[_Request] = []
        """Requests of ranks: the first has its turn, the others wait."""
        self._last: int | None = None
        self._has_examined = False
        """Whether a failure is or was at the prompt. These processes end with this failure, so no other is examined."""
        self._lock = threading.Lock()
        self._can_interrupt = self._is_closed = False

    def take(self, task: int, message: Message) -> bool:
        """Handle a message of a rank's debugger; return whether ``message`` is one."""
        match message:
            case DebugBegin():
                self._begin(_Request(task, message))
            case DebugText():
                self._put(DebugShown(task=task, rank=message.rank, step=message.step, text=message.text))
                if message.step == "end":
                    self._end_turn()
            case _:
                return False
        return True

    def _end_turn(self) -> None:
        """End the turn; then give the next rank its turn, or let the run go on."""
        del self._turns[:1]
        if self._turns:
            self._give_turn()
        else:
            self._channel.broadcast(Hold(on=False))

    def _begin(self, request: _Request) -> None:
        begin = request.begin
        chosen = self._plan.config.debug in ("first", begin.rank) and not begin.consequence
        if not can_type():
            self._refuse(request, f"{NOBODY}. PYTHONBREAKPOINT=0 passes over breakpoints")
        elif chosen or not begin.failed:
            self._await_turn(request)
        else:
            self._channel.call_later(CHOSEN_S, partial(self._await_turn, request))

    def _await_turn(self, request: _Request) -> None:
        if self._is_closed:
            return
        if request.begin.failed:
            if self._has_examined:
                return  # only one failure is examined; this rank gets no prompt and waits for the end of the run
            if request.begin.consequence:
                self._refuse(request, "it has failed because another rank has")
                return
            self._has_examined = True
        self._turns.append(request)
        if len(self._turns) == 1:
            self._give_turn()

    def _give_turn(self) -> None:
        task, begin = self._turns[0]
        self._channel.broadcast(Hold(on=True))
        if begin.failed or begin.rank != self._last:
            self._put(DebugShown(task=task, rank=begin.rank, step="turn", failed=begin.failed))
        self._last = begin.rank
        self._channel.send(task, DebugAnswer(rank=begin.rank))

    def _refuse(self, request: _Request, why: str) -> None:
        self._channel.send(request.task, DebugAnswer(rank=request.begin.rank, refused=why))

    def show(self, event: Message | LocalEvent, write: Callable[[str], None], say: Callable[[str], None]) -> bool:
        """Show a debugger's text by ``write``, and whose turn it is by ``say``; answer a request with a typed line.

        Return whether ``event`` is the debugger's.

        Raises:
            LagomError: if the person ends the run.
        """
        if not isinstance(event, DebugShown):
            return False
        if not self._is_closed:
            self._show(event, write, say)
        return True

    def _show(self, shown: DebugShown, write: Callable[[str], None], say: Callable[[str], None]) -> None:
        step, text = shown.step, shown.text
        if step == "turn":
            say(_turn_text(shown, self._plan.world_size))
        elif step == "quit":
            raise LagomError(f"the run was ended from the debugger, on rank {shown.rank} at {text}")
        elif step == "line":
            lines, end, prompt = text.rpartition("\n")
            write(lines + end)
            self._prompt(shown, prompt)
        else:
            write(text)

    def _prompt(self, shown: DebugShown, prompt: str) -> None:
        """Send the rank the line that is typed, unless its process ends before."""
        try:
            with self._lock:
                if self._is_closed:
                    return
                self._can_interrupt = threading.current_thread() is threading.main_thread()
            try:
                answer = _typed(shown.rank, prompt)
            finally:
                with self._lock:
                    self._can_interrupt = False
            if not self._is_closed:
                self._channel.send(shown.task, answer)
        except KeyboardInterrupt:
            if not self._is_closed:
                raise

    def close(self) -> None:
        """End a prompt that is open: the run is over, and no rank waits for its line any more."""
        with self._lock:
            self._is_closed = True
            if self._can_interrupt:
                self._can_interrupt = False
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _typed(rank: int, prompt: str) -> DebugAnswer:
    """Return the answer with the line that the person types, "" at the end of input; or a refusal if there is none."""
    try:
        return DebugAnswer(rank=rank, line=input(prompt) + "\n")
    except EOFError:
        print()
        return DebugAnswer(rank=rank)
    except RuntimeError:  # a front end without input, as when a notebook runs as a batch job
        return DebugAnswer(rank=rank, refused=NOBODY)


def _turn_text(shown: DebugShown, world_size: int) -> str:
    rank = f"rank {shown.rank} of {world_size}"
    others = "; the others wait at their next exchange" if world_size > 1 else ""
    if shown.failed:
        return f"{rank} has failed, and is in the debugger{others}. q ends it"
    return f"{rank} is in the debugger{others}. c lets it go on, q ends the run"
