"""``RankDebugger``: stops a rank at ``breakpoint()``, or where it has failed, for the person at the driver."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lagom.errors import CollectiveError, LagomError
from lagom.extensions.observe.debugger.messages import DebugAnswer, DebugBegin, DebugText
from lagom.extensions.observe.debugger.refusal import refuse
from lagom.random_states import random_states, set_random_states
from lagom.wire.messages import Message

if TYPE_CHECKING:
    from types import FrameType

    from lagom.extensions.observe.debugger.rank_pdb import DriverStream, RankPdb
    from lagom.plan import Plan
    from lagom.session.session import Session


class RankDebugger:
    """Takes turns with the debuggers of other ranks, and runs pdb. See Note [Stopped ranks].

    Args:
        ask: sends a message to the driver, and returns its answer.
        tell: sends a message to the driver.
        pid: id of the rank's process; a process that it has forked cannot stop.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        ask: Callable[[Message], Message],
        tell: Callable[[Message], None],
        pid: int,
    ) -> None:
        self.session: Session | None = None
        """The rank's state, once there is one."""
        self._plan, self._rank = plan, rank
        self._ask, self._tell = ask, tell
        self._pid = pid
        self._turn = threading.Lock()
        self._stopped: int | None = None
        """Id of the thread that is at the prompt; None if none is."""
        self._pdbs: dict[int, RankPdb] = {}
        """Debuggers by thread: each keeps the breakpoints that were set at its prompt."""

    def stop(self, frame: FrameType, header: str | None = None) -> None:
        """Stop in ``frame`` if this is the rank to stop.

        Raises:
            LagomError: if no rank can stop here (see ``_stops``), or the driver gives no turn (see ``begin``).
        """
        if not self._stops():
            return
        self.begin()
        pdb = self._pdb()
        if header is not None:
            pdb.message(header)
        pdb.set_trace(frame)

    @contextlib.contextmanager
    def post_mortem(self) -> Iterator[None]:
        """Open a prompt at an exception of the context before the exception ends the rank."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(LagomError):  # the driver gives this failure no turn
                self.begin(error)
                self._pdb().examine(error)
            raise

    def begin(self, error: Exception | None = None) -> None:
        """Wait for this rank's turn at the prompt, unless this thread has it already.

        Args:
            error: exception with which the rank has failed; None at a breakpoint.

        Raises:
            LagomError: if the driver refuses, as when nobody can type there or ``error`` follows from another rank's
                failure, or cannot be reached.
        """
        if self._stopped == threading.get_ident():
            return
        self._turn.acquire()
        sys.stdout.flush()
        is_consequence = isinstance(error, CollectiveError)
        begin = DebugBegin(rank=self._rank, failed=error is not None, consequence=is_consequence)
        try:
            self._answer(begin)
        except BaseException:
            self._turn.release()
            raise
        self._stopped = threading.get_ident()

    def ask(self, step: str, text: str) -> str:
        """Send ``text`` as a ``DebugText`` of the kind ``step``, and return the line that was typed.

        Raises:
            LagomError: if the driver refuses, as when nobody can type there, or cannot be reached.
        """
        return self._answer(DebugText(rank=self._rank, step=step, text=text))

    def tell(self, step: str, text: str) -> None:
        """Send ``text`` as a ``DebugText`` of the kind ``step``."""
        self._tell(DebugText(rank=self._rank, step=step, text=text))

    def _answer(self, message: Message) -> str:
        answer = self._ask(message)
        assert isinstance(answer, DebugAnswer)
        if answer.refused:
            raise LagomError(f"breakpoint() on rank {self._rank}, and {answer.refused}")
        return answer.line

    @contextlib.contextmanager
    def at_prompt(self, stream: DriverStream) -> Iterator[None]:
        """Hold the prompt in the context; standard input, output and error of typed commands are ``stream``."""
        self.begin()
        stdin, sys.stdin = sys.stdin, stream
        try:
            with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream), self._alone():
                if self.session is not None and self.session.forwards.sliced_forward is not None:
                    rows = self.session.forwards.sliced_forward.share
                    stream.write(f"(this forward has {rows.num_mine} of the {rows.num_all} rows of the batch)\n")
                yield
        finally:
            sys.stdin = stdin
            self._stopped = None
            stream.send("end")
            self._turn.release()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Run typed commands without exchanges with other ranks; restore the random states after them."""
        from lagom.forward.rows.draws import OperationMode  # imports torch, which a host process may lack

        session, states = self.session, None
        # In another thread states are not restored: the main thread draws random numbers meanwhile.
        if threading.current_thread() is threading.main_thread():
            states = random_states()
        if session is not None:
            session.typing_thread = threading.get_ident()
        OperationMode.pausing_thread = threading.get_ident()
        try:
            yield
        finally:
            OperationMode.pausing_thread = None
            if session is not None:
                session.typing_thread = None
                if session.forwards.sliced_forward is not None:
                    session.forwards.sliced_forward.was_at_prompt = True
            if states is not None:
                set_random_states(states)

    def _pdb(self) -> RankPdb:
        from lagom.extensions.observe.debugger.rank_pdb import RankPdb

        return self._pdbs.setdefault(threading.get_ident(), RankPdb(self))

    def _stops(self) -> bool:
        """Return whether this rank stops at a breakpoint now.

        Raises:
            LagomError: if no rank can stop here: in a process that a rank has forked, or in a trial of a search.
        """
        if os.getpid() != self._pid:
            refuse()
        if self._plan.searches:
            raise LagomError(
                "breakpoint() in a trial of a search, of which several run at a time: debug a run with the trial's "
                "hyperparameters, by TorchDistributedConfig or `lagom debug`. PYTHONBREAKPOINT=0 passes over it"
            )
        chosen = self._plan.config.debug
        is_probing = self.session is not None and self.session.forwards.is_probing
        if is_probing or self._plan.rehearsal is not None or self._stopped == threading.get_ident():
            return False  # in a forward that lagom repeats, in a rehearsal before the run, or in a typed command
        return self._rank == (chosen if isinstance(chosen, int) else 0)


# Note [Stopped ranks]
#
# pdb runs in the rank. Its output goes to the driver as messages, and for each line that pdb reads the rank sends a
# request, which the driver answers with the typed line. Both travel in the run's own channel, with its proofs and
# encryption. Before its first output a rank asks for its turn, which the driver gives to one rank at a time.
#
# From the turn to its end the driver holds the run: no host counts a rank's silence as a stall. In a run that is
# debugged (``debug=``) exchanges wait for days, and a rank whose function has failed asks for a turn before it
# reports the failure; the others wait in their next exchange. All ranks run the same program, so all fail alike: one
# gets the turn (the chosen rank, else the first), and the others wait until the end of the run.
#
# A typed command runs in the middle of the program on one rank. Patches do nothing then, as in a process forked from
# the rank, so that a model's call is computed whole, without the other ranks. Random generators are restored (in the
# main thread), since they have to stay equal on all ranks. A typed command can change the program's own values, on this
# rank alone.
