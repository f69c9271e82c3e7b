"""``run``: sets up one rank, calls the training function, and returns its result."""

from __future__ import annotations

import _io
import contextlib
import ctypes
import functools
import gc
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lagom.exchange.run_store import SealedStore
from lagom.extensions.registry import EXTENSIONS
from lagom.on_rank.figures import shown_pictures
from lagom.on_rank.private_group import process_group
from lagom.on_rank.process_settings import set_process_settings
from lagom.on_rank.rank_environment import environment, launcher_variables, rank_device, threads
from lagom.on_rank.reporter import Reporter
from lagom.plan import Plan
from lagom.program.signature import Call, arguments, check_returned, makes_data
from lagom.random_states import random_states, set_random_states, start_random_states
from lagom.run_state.random_streams import seed_everything
from lagom.session.call_changes import CallChanges
from lagom.session.patched import patched
from lagom.session.session import Session
from lagom.watch.spans import Spans
from lagom.wire.spec import RankSpec
from lagom.world import Place, place_set

Returned = dict[str, Any]
"""Dict with ``value``, the function's return value (in a rehearsal its ``Record``); ``samples``, the number of samples
that this rank trained on; ``timings``, seconds until the call of the function and in it; and only on rank 0, if there
are any: ``random``, the final states of those random generators that began in the driver's state, ``changed``, names of
the program's objects that the function has changed, ``whole``, a ``WholeModule`` for each module that ran whole,
``speed``, the ``Speed`` of its steps, and ``devices``, facts about the ranks' accelerators."""


def run(
    plan: Plan,
    place: Place,
    load: Callable[[], Call],
    host_dir: Path,
    rank_spec: RankSpec | None = None,
    attach: Callable[[Session], None] = lambda _: None,
) -> Returned:
    """Run one rank: set up its process, call the function, return its result.

    Args:
        load: unpickles the call; called inside the patches.
        rank_spec: the rank's resources; None for an inline run in the caller's process, whose settings then stay.
        attach: called with the session before extensions and patches are entered.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(environment(rank_spec))
        stack.enter_context(place_set(place))
        session = _joined_session(plan, place, host_dir, rank_spec, stack)
        if plan.gpu:
            from lagom.on_rank.device_facts import device_facts  # for ranks with an accelerator only

            session.device_facts = device_facts(session)
        attach(session)
        stack.enter_context(patched(session))
        if rank_spec is not None:
            stack.enter_context(shown_pictures(session))
        call = load()  # inside the patches, which must see the modules that unpickling creates
        session.is_unpacked = True
        if rank_spec is not None:  # without a rank_spec, this is the driver's process, which has these settings
            set_process_settings(call.settings)
        stack.enter_context(seeded(plan.config.seed, call.random_states))
        function, changes = _function(session, call, stack)
        if rank_spec is not None:  # without a rank_spec, the program's forks belong to the caller
            stack.enter_context(end_forks())
        return _returned(session, call, function, changes, began)


def _joined_session(plan: Plan, place: Place, host_dir: Path, rank_spec: RankSpec | None, stack: ExitStack) -> Session:
    """Connect the rank with the others, if there are any, and return its session; ``stack`` undoes it."""
    device = rank_device(plan) if rank_spec is None else rank_device(plan, rank_spec.gpu, rank_spec.gpu_index)
    group, store = None, None
    if rank_spec is not None:
        stack.enter_context(threads(rank_spec.threads))
    if rank_spec is not None and place.world_size > 1:
        group, store = stack.enter_context(process_group(rank_spec, place.world_size, device, plan.config))
    if plan.already_distributed:
        notes = SealedStore(store, rank_spec.key) if store is not None and rank_spec is not None else None
        stack.enter_context(launcher_variables(place, rank_spec, notes))
    return Session(
        plan=plan,
        group=group,
        store=store,
        key=rank_spec.key if rank_spec is not None else b"",
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        device=device,
        host_dir=host_dir,
        spans=Spans(place.rank) if any(extension.records_spans(plan) for extension in EXTENSIONS) else None,
    )


def _function(session: Session, call: Call, stack: ExitStack) -> tuple[Callable[[], Any], CallChanges | None]:
    """Return a function that calls the training function, as extensions have wrapped it.

    The second item remembers the objects that the training function may change; None if nobody is to know.
    """
    reporter = Reporter(session)
    changes: list[CallChanges] = []

    def make() -> Callable[[], Any]:
        positional, named = arguments(call.function, MadeArguments(dict(call.provided) | {"reporter": reporter}))
        plan = session.plan
        if session.rank == 0 and plan.launcher != "inline" and plan.rehearsal is None and not plan.searches:
            changes.append(CallChanges(call, reads_parameters=not session.backwards.parameter_store.keeps_shards))
        return functools.partial(call.function, *positional, **named)

    function = session.events.function.wrap(make, call, {"reporter": reporter}, stack)()
    return function, changes[0] if changes else None


def _returned(
    session: Session, call: Call, function: Callable[[], Any], changes: CallChanges | None, began: float
) -> Returned:
    with _ShortageReports(session):
        session.progress.is_called = True
        called = time.monotonic()
        value = function()
        timings = {"start": called - began, "function": time.monotonic() - called}
        if session.plan.rehearsal is None:
            check_returned(call.function, value)
        if session.device.type != "cpu" and not session.plan.names_gpu:
            from lagom.run_state.device_moves import move_to_device  # for ranks with an accelerator only

            value = move_to_device(value, torch.device("cpu"))
    returned = {"value": value, "samples": session.progress.samples_trained, "timings": timings}
    if changes is not None and (names := changes.names(value)):
        returned["changed"] = names
    if session.rank == 0 and (whole := session.forwards.whole_calls.modules()):
        returned["whole"] = whole
    if session.rank == 0:
        from lagom.session.step_speed import step_speed  # when the program has ended

        if speed := step_speed(session):
            returned["speed"] = speed
    if session.rank == 0 and session.device_facts:
        returned["devices"] = session.device_facts
    if session.rank == 0 and call.random_states is not None:
        returned["random"] = {name: state for name, state in random_states().items() if name in call.random_states}
    return returned


class _ShortageReports:
    """Context manager around the program that adds reports to errors of memory and disks; the type stays."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: TracebackType | None) -> None:
        # A class, since a generator-based context manager would add its frame to the traceback.
        if error is None:
            return
        with contextlib.suppress(MemoryError, OSError):  # the imports themselves may lack what the program lacks
            from lagom.on_rank.disk_full_report import add_disk_report  # for an error only
            from lagom.on_rank.oom_report import add_memory_report

            add_disk_report(self._session, error)
            add_memory_report(self._session, error)


@contextmanager
def end_forks() -> Iterator[None]:
    """Context manager that ends a child process, forked by the program, when the child returns from the function.

    The child is not a rank, so it must not report the rank's outcome or take part in exchanges. It ends as Python ends
    a program.
    """
    rank, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == rank:
            raise
        code = 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        elif isinstance(error.code, int | None):
            code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
    if os.getpid() != rank:
        run_exit_handlers(lambda: os._exit(code))
        os._exit(code)


@contextmanager
def seeded(seed: int | None, states: Mapping[str, Any] | None) -> Iterator[None]:
    """Start all generators from ``seed``, or from the driver's ``states``; restore their states afterwards."""
    before = random_states()
    if seed is not None:
        seed_everything(seed)
    elif states is not None:
        start_random_states(states)
    try:
        yield
    finally:
        set_random_states(before)


class MadeArguments(Mapping[str, Any]):
    """Arguments of the training function; data sets that ranks build themselves are built at their first use."""

    def __init__(self, provided: Mapping[str, Any]) -> None:
        self._provided = provided
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._provided

    def __iter__(self) -> Iterator[str]:
        return iter(self._provided)

    def __len__(self) -> int:
        return len(self._provided)

    def _make(self, name: str) -> Any:
        if name == "dataset":
            return [self["train_set"], self["test_set"]]
        value = self._provided[name]
        return value() if name in ("train_set", "test_set") and makes_data(value) else value


def run_exit_handlers(give_up: Callable[[], None], patience_s: float = 30.0) -> None:
    """Do what Python does at the end of a process: a rank or its fork ends by ``os._exit``, which skips all this.

    Like Python, wait for threads and processes that the function has left running. After ``patience_s`` seconds, call
    ``give_up`` from another thread.
    """
    import atexit
    import multiprocessing
    import multiprocessing.util
    import threading

    def lose_patience() -> None:
        threads = [thread for thread in threading.enumerate() if not thread.daemon]
        left = [thread.name for thread in threads if thread is not threading.main_thread()]
        left += [process.name for process in multiprocessing.active_children() if not process.daemon]
        sys.stderr.write(
            f"[lagom] ended what the function left running {patience_s:g} s after it returned: {', '.join(left)}\n"
        )
        flush()
        give_up()

    watchdog = threading.Timer(patience_s, lose_patience)
    watchdog.daemon = True
    watchdog.start()
    flush()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    watchdog.cancel()
    flush_files()
    flush()


def flush_files(*, is_end: bool = True) -> None:
    """Flush files that the program has opened and not closed, as Python does at its end.

    With ``is_end``, close compressed files, which are complete only then. Files from before the fork are not found:
    ``gc.freeze`` hides them.
    """
    # ``_io._IOBase`` is the class in C: a test for ``io.IOBase``, an ABC, would run Python code for each type.
    files = [one for one in gc.get_objects() if issubclass(type(one), _io._IOBase)]
    # The order matters: a text file may write to a compressed file, and a compressed file to a buffered file.
    texts = [one for one in files if issubclass(type(one), io.TextIOWrapper)]
    compressed = [one for one in files if type(one).__module__ in ("gzip", "bz2", "lzma")]
    buffers = [one for one in files if issubclass(type(one), (io.BufferedWriter, io.BufferedRandom))]
    for one in (*texts, *compressed, *buffers):
        with contextlib.suppress(Exception):
            if is_end and one in compressed and one.writable():
                one.close()
            else:
                one.flush()


def flush() -> None:
    """Flush standard output and error, including the buffers of C code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)
