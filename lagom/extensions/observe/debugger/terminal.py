"""``DebugTerminal``: the driver's end of debuggers on ranks: whose turn it is, what they show, and what is typed."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial

from lagom.errors import LagomError
from lagom.plan import Plan
from lagom.watch.notebook import notebook
from lagom.wire.client import Message
from lagom.wire.server import DriverServer

CHOSEN_S = 10.0
"""Seconds for the chosen rank to fail too, before another failed rank gets its turn."""
NOBODY = "nobody can type at the driver: its standard input is no terminal, and it is no notebook with input"


def can_type() -> bool:
    """Return whether somebody can type: standard input is a terminal, or this process is a notebook's."""
    with contextlib.suppress(AttributeError, ValueError):  # there is no standard input, or it is closed
        return notebook() is not None or sys.stdin.isatty()
    return False


class DebugTerminal:
    """Gives ranks their turns, one at a time, and holds the run meanwhile.

    See Note [Stopped ranks] in rank_debugger.py.

    Args:
        channel: the server of the run; all methods except ``show`` and ``close`` run in its thread.
        put: passes a message to the thread that shows the run, which calls ``show`` with it.
    """

    def __init__(self, plan: Plan, channel: DriverServer, put: Callable[[Message], None]) -> None:
        self._plan, self._channel, self._put = plan, channel, put
        self._turns: list[Message] = []
        """Requests of ranks: the first has its turn, the others wait."""
        self._last: int | None = None
        self._has_examined = False
        """Whether a failure is or was at the prompt. These processes end with this failure, so no other is examined."""
        self._lock = threading.Lock()
        self._processes = 0
        """Counts how often the ranks' processes have ended: messages of earlier ones no longer count."""
        self._can_interrupt = self._is_closed = False

    def take(self, task: int, message: Message) -> None:
        """Handle a message of a rank's debugger."""
        message = message | {"task": task, "processes": self._processes}
        if message["step"] == "begin":
            self._begin(message)
            return
        self._put(message)
        if message["step"] == "end":
            self._end_turns(1)

    def _end_turns(self, num: int | None = None) -> None:
        """End the first ``num`` turns, or all; then give the next rank its turn, or let the run go on."""
        del self._turns[:num]
        if self._turns:
            self._give_turn()
        else:
            self._channel.broadcast({"type": "hold", "on": False})

    def _begin(self, message: Message) -> None:
        chosen = self._plan.config.debug in ("first", message["rank"]) and not message["consequence"]
        if not can_type():
            self._answer(message, refused=f"{NOBODY}. PYTHONBREAKPOINT=0 passes over breakpoints")
        elif chosen or not message["failed"]:
            self._await_turn(message)
        else:
            self._channel.call_later(CHOSEN_S, partial(self._await_turn, message))

    def _await_turn(self, message: Message) -> None:
        if not self._is_current(message):
            return  # its process has ended meanwhile
        if message["failed"]:
            if self._has_examined:
                return  # only one failure is examined; this rank gets no prompt and waits for the end of the run
            if message["consequence"]:
                self._answer(message, refused="it has failed because another rank has")
                return
            self._has_examined = True
        self._turns.append(message)
        if len(self._turns) == 1:
            self._give_turn()

    def _give_turn(self) -> None:
        message = self._turns[0]
        self._channel.broadcast({"type": "hold", "on": True})
        if message["failed"] or message["rank"] != self._last:
            self._put(message | {"step": "turn"})
        self._last = message["rank"]
        self._answer(message, line="")

    def _answer(self, message: Message, **answer: str) -> None:
        self._channel.send(message["task"], {"type": "debug", "rank": message["rank"], **answer})

    def show(self, message: Message, write: Callable[[str], None], say: Callable[[str], None]) -> None:
        """Show a debugger's text by ``write``, and whose turn it is by ``say``; answer a request with a typed line.

        Raises:
            LagomError: if the person ends the run.
        """
        step, text, rank = message["step"], message.get("text", ""), message["rank"]
        if not self._is_current(message):
            return
        if step == "turn":
            say(_turn_text(message, self._plan.world_size))
        elif step == "quit":
            raise LagomError(f"the run was ended from the debugger, on rank {rank} at {text}")
        elif step == "line":
            lines, end, prompt = text.rpartition("\n")
            write(lines + end)
            self._prompt(message, prompt)
        else:
            write(text)

    def _prompt(self, message: Message, prompt: str) -> None:
        """Send the rank the line that is typed, unless its process ends before."""
        try:
            with self._lock:
                if not self._is_current(message):
                    return
                self._can_interrupt = threading.current_thread() is threading.main_thread()
            try:
                answer = _typed(prompt)
            finally:
                with self._lock:
                    self._can_interrupt = False
            if self._is_current(message):
                self._answer(message, **answer)
        except KeyboardInterrupt:
            if self._is_current(message):
                raise

    def _is_current(self, message: Message) -> bool:
        return not self._is_closed and bool(message["processes"] == self._processes)

    def forget_ranks(self) -> None:
        """End a prompt that is open, and all turns: the ranks' processes have ended, and others take their places."""
        self._end_prompt()
        self._has_examined = False
        self._end_turns()

    def close(self) -> None:
        """End a prompt that is open: the run is over, and no rank waits for its line any more."""
        self._is_closed = True
        self._end_prompt()

    def _end_prompt(self) -> None:
        with self._lock:
            self._processes += 1
            if self._can_interrupt:
                self._can_interrupt = False
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _typed(prompt: str) -> Message:
    """Return the answer with the line that the person types, "" at the end of input; or a refusal if there is none."""
    try:
        return {"line": input(prompt) + "\n"}
    except EOFError:
        print()
        return {"line": ""}
    except RuntimeError:  # a front end without input, as when a notebook runs as a batch job
        return {"refused": NOBODY}


def _turn_text(message: Message, world_size: int) -> str:
    rank = f"rank {message['rank']} of {world_size}"
    others = "; the others wait at their next exchange" if world_size > 1 else ""
    if message["failed"]:
        return f"{rank} has failed, and is in the debugger{others}. q ends it"
    return f"{rank} is in the debugger{others}. c lets it go on, q ends the run"
