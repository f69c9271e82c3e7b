"""``RankCall``: one rank's call of the training function, from its payload to its outcome."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lagom.errors import CollectiveError, EndOfFunction, PayloadError
from lagom.extensions.registry import wanted
from lagom.on_rank.heartbeat import Heartbeat
from lagom.program.payload import InParts, Parcel, unpack, unpack_file
from lagom.program.pickler import classes_received
from lagom.program.signature import Call
from lagom.wire.client import DriverClient
from lagom.wire.framing import shorten
from lagom.wire.messages import Message, RankReport
from lagom.wire.spec import RankSpec, RunSpec
from lagom.world import Place, rank_calls_reported

if TYPE_CHECKING:
    from lagom.on_rank.bootstrap import Returned
    from lagom.session.session import Session

_IDLE_S = 3600.0


class RankCall:
    """Calls the training function on the rank's own disk, and reports to the host process."""

    def __init__(self, spec: RunSpec, rank_spec: RankSpec) -> None:
        self.spec = spec
        self.rank_spec = rank_spec
        """The rank's resources; an extension may replace it before the call."""
        self.own_classes: dict[type, str] = {}
        """Classes that came with the call, with the sender's ids for them."""
        self.changes: list[Callable[[Call], Call]] = []
        """Functions that make the call of this rank from the call that all runs of these processes share."""
        self.reports: list[Callable[[RankReport, Returned | None], RankReport]] = []
        """Functions that complete the report of the outcome, given what the function returned; None: it was ended."""
        self.parts: dict[str, Any] = {}
        """What extensions keep for this rank, by the name of the extension; the session gets it."""
        self._control = DriverClient(socket.socket(fileno=rank_spec.control_fd))
        self._heartbeat = Heartbeat(self._control, spec.plan, rank_spec.stacks_fd)
        self._decided = threading.Lock()
        """Locked by the thread that sets the outcome: the main thread, or one that reports an error in its place."""

    def tell(self, message: Message) -> None:
        """Send ``message`` to the driver; drop it if the connection is closed."""
        self._heartbeat.tell(message)

    def ask(self, message: Message) -> Message:
        """Send ``message`` to the driver or the host process, and wait for the answer.

        Raises:
            LinkClosed: if the host process has ended.
        """
        return self._heartbeat.ask(message)

    def wait(self) -> Message:
        """Wait for a message that the host process sends by itself; before the function is called."""
        while (message := self._control.receive(_IDLE_S)) is None:
            pass
        return message

    def run(self) -> NoReturn:
        """Call the function, report the outcome, and end the process."""
        self._enter_disk()
        for extension in wanted(self.spec.plan):
            self._contexts.enter_context(extension.process(self))
        parcel, report = self._outcome()
        self._decided.acquire()
        parcel.write(self.rank_spec.outcome_fd)
        _end(report, self._heartbeat)

    def _enter_disk(self) -> None:
        """Enter the rank's own disk, and never leave it: exit handlers of the program write files too.

        See Note [A disk of each rank's own] in disk/install.py.
        """
        from lagom.disk import asked_for_rank, own_disk

        rank_spec, plan, place, begins = self.rank_spec, self.spec.plan, self.spec.snapshots, None
        if plan.rehearsal is not None and place is not None and place.resumed is not None and place.folder.is_here():
            begins = place.folder.disk
        disk = own_disk(
            rank_spec.host_dir,
            rank_spec.rank,
            plan.world_size,
            rank_spec.local_world_size,
            lands=plan.rehearsal is None and not plan.searches,
            written=self.spec.files,
            tell=self.tell,
            begins=begins,
        )
        self._contexts = contextlib.ExitStack()  # referenced: the contexts would end if they were garbage-collected
        self._contexts.enter_context(disk)
        self._contexts.enter_context(rank_calls_reported(asked_for_rank))

    def _outcome(self) -> tuple[Parcel, RankReport]:
        from lagom.on_rank import bootstrap

        rank_spec, plan = self.rank_spec, self.spec.plan
        divides = plan.config.batches != "whole"
        place = Place(rank_spec.rank, plan.world_size, rank_spec.local_rank, rank_spec.local_world_size, divides)
        try:
            returned = bootstrap.run(plan, place, self._load, Path(rank_spec.host_dir), rank_spec, self._attach)
            parcel, report = pack_result(returned, rank_spec.rank, self.own_classes)
            report = self._completed(report, returned)
        except EndOfFunction:
            parcel, report = Parcel({"value": None}), RankReport(rank=rank_spec.rank, ok=True)
            report = self._completed(report, None)
        except BaseException as error:  # SystemExit and KeyboardInterrupt are outcomes as well
            text = self._advice(error)
            parcel, report = pack_error(error, rank_spec.rank, self.own_classes)
            report = self._completed(dataclasses.replace(report, advice=text), None)
        return parcel, report

    def _completed(self, report: RankReport, returned: Returned | None) -> RankReport:
        for complete in self.reports:
            report = complete(report, returned)
        return report

    def _advice(self, error: BaseException) -> str:
        from lagom.program.failure_advice import advice  # imported for an error only

        plan = self.spec.plan
        ships = plan.config.packages == "ship"
        return advice(error, plan.packages, already_distributed=plan.already_distributed, ships=ships)

    def _load(self) -> Call:
        call: Call = unpack_file(self.rank_spec.payload_fd)
        for change in self.changes:
            call = change(call)
        self.own_classes.update(classes_received())
        main = vars(sys.modules["__main__"])
        for name, value in _parts_of_main(call, self.own_classes):
            main.setdefault(name, value)
        return call

    def _attach(self, session: Session) -> None:
        session.fail, session.rank_call = self._fail, self
        session.parts |= self.parts
        self._heartbeat.beat_for(session)

    def _fail(self, error: BaseException) -> None:
        if self._decided.acquire(blocking=False):
            parcel, report = pack_error(error, self.rank_spec.rank, self.own_classes)
            parcel.write(self.rank_spec.outcome_fd)
            self._heartbeat.send_outcome(report)


def _parts_of_main(call: Call, classes: Iterable[type]) -> Iterator[tuple[str, Any]]:
    """Yield name and object of the classes and functions of the driver's ``__main__`` that came with ``call``.

    They are put into the rank's ``__main__``, since workers of a DataLoader or of the program's pools pickle them by
    name.
    """
    provided = call.provided
    values = [call.function, *provided.values(), *provided.get("hparams", {}).values()]
    for kind in classes:
        if kind.__module__ == "__main__":
            yield kind.__qualname__, kind
            values += vars(kind).values()
    for value in values:
        function = value.func if isinstance(value, functools.partial) else value
        while _is_of_main(function):
            yield function.__name__, function
            yield from ((name, one) for name, one in function.__globals__.items() if _is_of_main(one))
            function = getattr(function, "__wrapped__", None)


def _is_of_main(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and value.__module__ == "__main__"


def _end(report: RankReport, heartbeat: Heartbeat) -> NoReturn:
    """End the program as Python does, and report the outcome.

    After a failure, call exit handlers only if the program called ``sys.exit``, and wait until the host process kills
    this process.
    """
    from lagom.disk import finish_writes
    from lagom.on_rank import bootstrap

    if not report.ok:
        if report.exited:  # after ``sys.exit`` Python waits for threads, and calls the program's exit handlers
            bootstrap.run_exit_handlers(lambda: heartbeat.send_outcome(report))
        bootstrap.flush_files()
        bootstrap.flush()
        finish_writes()
        # Report before the end: the end of this process closes its connections, and other ranks then fail.
        heartbeat.send_outcome(report)
        threading.Event().wait()  # for ever: the host process reports the failure and kills this process

    def end() -> NoReturn:
        finish_writes()
        heartbeat.send_outcome(report)
        os._exit(0)

    bootstrap.run_exit_handlers(end)
    end()


def pack_result(returned: Mapping[str, Any], rank: int, own_classes: Mapping[type, str]) -> tuple[Parcel, RankReport]:
    """Pack ``returned`` of ``rank``, or the error if it cannot be pickled.

    Args:
        own_classes: classes that came from the driver, with the driver's ids, by which they are pickled.
    """
    try:
        return Parcel(returned, own_classes), RankReport(rank=rank, ok=True)
    except PayloadError as error:
        raised = PayloadError(f"rank {rank} returned a {type(returned['value']).__name__}, but {error}")
        raised.__cause__ = error.__cause__
        return pack_error(raised, rank, own_classes)


def pack_error(error: BaseException, rank: int, own_classes: Mapping[type, str]) -> tuple[Parcel, RankReport]:
    """Pack ``error``, which ended the function on ``rank``.

    The report alone describes a SystemExit, or an error that cannot be pickled or unpickled.
    """
    from lagom.program.own_frames import cut_own_frames  # imported for an error only

    cut_own_frames(error)
    text = shorten("".join(traceback.format_exception(error)), keep_end=True)
    report = RankReport(
        rank=rank,
        ok=False,
        consequence=isinstance(error, CollectiveError),
        error=type(error).__name__,
        message=_message(error),
        traceback=text,
    )
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int | None) else shorten(str(error.code))
        return Parcel({"error": None}), dataclasses.replace(report, exited=True, exit=code)
    error.__traceback__ = None
    for travelling in (error, InParts(error)):
        try:
            parcel = Parcel({"error": travelling}, own_classes)
            unpack(bytearray(parcel.tobytes()))
        except Exception:  # a class of the program may raise any error when it is pickled or unpickled
            continue
        return parcel, report
    return Parcel({"error": None}), report


def _message(error: BaseException) -> str:
    try:
        return shorten(str(error))
    except Exception as failure:  # ``__str__`` of a program's own class may raise any error
        return f"(its message fails with {type(failure).__name__})"
