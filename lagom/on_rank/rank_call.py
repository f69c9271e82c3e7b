"""``RankCall``: one rank's call of the training function, from its payload to its outcome."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import os
import socket
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import lagom.extensions.search.on_rank.change  # noqa: F401  (a trial's change has its class: 4 ms in each rank otherwise)
from lagom.extensions.observe.debugger.rank_debugger import RankDebugger
from lagom.extensions.search.on_rank.trial import Trial, TrialPruned, metric_of
from lagom.on_rank.heartbeat import Heartbeat
from lagom.on_rank.outcome import pack_error, pack_result
from lagom.on_rank.process_settings import library_settings, set_process_settings
from lagom.patching.importers import imported_after, newest_module
from lagom.program.call import Call
from lagom.program.failure_advice import advice
from lagom.program.payload import Parcel, unpack, unpack_file
from lagom.program.pickler import classes_received
from lagom.program.sources import is_installed
from lagom.wire.client import DriverClient, Message
from lagom.wire.spec import RankSpec, RunSpec
from lagom.world import Place, rank_calls_reported

if TYPE_CHECKING:
    from types import ModuleType

    from lagom.session.session import Session

_IDLE_S = 3600.0
_MAX_IMPORTS = 10_000  # most names of modules, which must fit into a frame


class RankCall:
    """Calls the training function on the rank's own disk, and reports to the host process."""

    def __init__(self, spec: RunSpec, seat: RankSpec) -> None:
        self._spec = spec
        self._seat = seat
        self._control = DriverClient(socket.socket(fileno=seat.control_fd))
        self._heart = Heartbeat(self._control, spec.plan, seat.stacks_fd)
        self._debugger = RankDebugger(spec.plan, seat.rank, self._heart.ask, self._heart.tell)
        self._trial: Trial | None = None
        self._change: bytes | None = None
        """Pickled function that makes the trial's call from the call that all trials share; None outside a search."""
        self._at_home: dict[type, str] = {}
        self._newest = newest_module()
        self._decided = threading.Lock()
        """Locked by the thread that sets the outcome: the main thread, or one that reports an error in its place."""

    def tell(self, message: Message) -> None:
        """Send ``message`` to the driver."""
        self._heart.tell(message)

    def run(self) -> NoReturn:
        """Call the function, report the outcome, and end the process."""
        self._enter_disk()
        if self._spec.plan.searches:
            self._wait_for_trial()
        parcel, report = self._outcome()
        self._decided.acquire()
        parcel.write(self._seat.outcome_fd)
        if self._trial is not None:
            report |= {"imports": _installed_imports(self._newest)}
        _end(report, self._heart)

    def _enter_disk(self) -> None:
        """Enter the rank's own disk, and never leave it: exit handlers of the program write files too.

        See Note [A disk of each rank's own] in disk/install.py.
        """
        from lagom.disk import asked_for_rank, own_disk

        seat, plan, place, begins = self._seat, self._spec.plan, self._spec.snapshots, None
        if plan.rehearsal is not None and place is not None and place.resumed is not None and place.folder.is_here():
            begins = place.folder.disk
        disk = own_disk(
            seat.host_dir,
            seat.rank,
            plan.world_size,
            seat.local_world_size,
            lands=plan.rehearsal is None and not plan.searches,
            written=self._spec.files,
            tell=self._heart.tell,
            begins=begins,
        )
        stack = contextlib.ExitStack()
        stack.enter_context(disk)
        stack.enter_context(rank_calls_reported(asked_for_rank))
        stack.enter_context(self._debugger.installed())
        self._disk = stack  # keep a reference: the contexts would end if they were garbage-collected

    def _wait_for_trial(self) -> None:
        """Wait for a trial from the host process, and adopt it. See Note [Ranks that wait] in host/trial_ranks.py."""
        while (trial := self._control.receive(_IDLE_S)) is None:
            pass
        os.environ.update(trial["env"])
        own = {name: trial[name] for name in ("gpu", "gpu_index", "nccl", "threads")}
        self._seat = dataclasses.replace(self._seat, **own)
        self._trial = Trial(self._heart.ask, trial["metric"], trial["number"])
        self._change = base64.b64decode(trial["change"])

    def _outcome(self) -> tuple[Parcel, Message]:
        from lagom.on_rank import bootstrap

        seat, trial = self._seat, self._trial
        plan = self._spec.plan
        divides = plan.config.batches != "whole"
        place = Place(seat.rank, plan.world_size, seat.local_rank, seat.local_world_size, divides)
        try:
            returned = bootstrap.run(plan, place, self._load, Path(seat.host_dir), seat, self._watch)
            parcel, report = pack_result(returned, seat.rank, self._at_home)
            if trial is not None:
                is_told = seat.rank == 0 or returned["value"] is not None
                metric = metric_of(returned["value"], trial.metric, trial.logged) if is_told else None
                report |= {"metric": metric, "samples": returned["samples"]}
        except TrialPruned:
            parcel, report = Parcel({"value": None}), {"type": "outcome", "ok": True, "pruned": True}
        except BaseException as error:  # SystemExit and KeyboardInterrupt are outcomes as well
            text = self._advice(error)
            parcel, report = pack_error(error, self._at_home)
            report |= {"advice": text} if text else {}
        return parcel, report

    def _advice(self, error: BaseException) -> str:
        plan = self._spec.plan
        return advice(error, plan.packages, already_distributed=plan.already_distributed)

    def _load(self) -> Call:
        call: Call = unpack_file(self._seat.payload_fd)
        if self._change is not None:
            call = unpack(self._change)(call)
        self._at_home.update(classes_received())
        main = vars(sys.modules["__main__"])
        for name, value in _parts_of_main(call, self._at_home):
            main.setdefault(name, value)
        return call

    def _watch(self, session: Session) -> None:
        session.fail = self._fail
        session.debugger, self._debugger.session = self._debugger, session
        session.trial = self._trial
        self._keep_snapshots(session)
        self._heart.beat_for(session)

    def _keep_snapshots(self, session: Session) -> None:
        if (place := self._spec.snapshots) is None:
            return
        from lagom.disk import growing_lengths, keep_disk, reach_disk
        from lagom.extensions.resume.snapshot_files import SnapshotFiles
        from lagom.extensions.resume.snapshot_taker import Snapshots
        from lagom.extensions.verify.on_rank.rehearsed_snapshot import RehearsedSnapshot
        from lagom.on_rank.bootstrap import flush_files

        heart, payload_fd, settings = self._heart, self._seat.payload_fd, (library_settings, set_process_settings)
        files = SnapshotFiles(place, self._spec, self._seat.host_dir, payload_fd)
        if self._spec.plan.rehearsal is None:
            session.snapshots = Snapshots(
                session, files, payload_fd, heart.tell, heart.ask, self._at_home, growing_lengths, settings
            )
            return

        def no_lengths() -> dict[str, int]:
            """Save a rehearsal's overlay disk; return no lengths, since it appends to no file on the real disk."""
            flush_files(is_end=False)
            keep_disk(place.folder.disk)
            return {}

        reach_disk(place.folder.path)
        session.snapshots = RehearsedSnapshot(
            session, files, payload_fd, heart.ask, self._at_home, no_lengths, settings
        )

    def _fail(self, error: BaseException) -> None:
        if self._decided.acquire(blocking=False):
            parcel, report = pack_error(error, self._at_home)
            parcel.write(self._seat.outcome_fd)
            self._heart.send_outcome(report)


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


def _end(report: Message, heart: Heartbeat) -> NoReturn:
    """End the program as Python does, and report the outcome.

    After a failure, call exit handlers only if the program called ``sys.exit``, and wait until the host process kills
    this process.
    """
    from lagom.disk import finish_writes
    from lagom.on_rank import bootstrap

    if not report["ok"]:
        if "exit" in report:  # after ``sys.exit`` Python waits for threads, and calls the program's exit handlers
            bootstrap.run_exit_handlers(lambda: heart.send_outcome(report))
        bootstrap.flush_files()
        bootstrap.flush()
        finish_writes()
        # Report before the end: the end of this process closes its connections, and other ranks then fail.
        heart.send_outcome(report)
        threading.Event().wait()  # for ever: the host process reports the failure and kills this process

    def end() -> NoReturn:
        finish_writes()
        heart.send_outcome(report)
        os._exit(0)

    bootstrap.run_exit_handlers(end)
    end()


def _installed_imports(newest: ModuleType) -> list[str]:
    """Return the names of lagom's and installed packages' modules imported after ``newest``, in order of import."""
    found = []
    for module in reversed(imported_after(newest)):
        name, path = getattr(module, "__name__", None), getattr(module, "__file__", None)
        if isinstance(name, str) and isinstance(path, str) and (name.startswith("lagom.") or is_installed(path)):
            found.append(name)
    return found[:_MAX_IMPORTS]
