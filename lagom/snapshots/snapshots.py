"""``Snapshots``: keeps the state of the program on disk now and then, and has a rank go on from it. See Note [Snapshots]."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import sys
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lagom.call import Call
from lagom.errors import LagomError
from lagom.payload import Parcel, parts_of
from lagom.program.sources import reachable_modules
from lagom.random_states import random_states, set_random_states
from lagom.restart.kept_snapshots import SnapshotPlace
from lagom.snapshots.call_memory import CallMemory
from lagom.snapshots.frame_position import NoSnapshotError
from lagom.snapshots.frames import FrameState, ProgramFrames
from lagom.snapshots.loader_positions import PASS_START, begun, pass_start
from lagom.snapshots.object_reducers import reduce_object, set_thread_state, thread_state
from lagom.snapshots.progress_bars import resumable_bars
from lagom.snapshots.source_code import SourceFile, codes, compiled
from lagom.snapshots.state_pickle import is_data, pickle_state, program_globals, unpickle_state
from lagom.unpicklable import find_unpicklable

if TYPE_CHECKING:
    from lagom.session.session import Session

log = logging.getLogger("lagom")

LOADER = "_lagom_loader"
_SHARE = 0.01
"""Largest share of the run's time that forks and the pages copied after them may take."""
_PUT_OFF_S = 0.02
"""Time until the next look after a place at which no snapshot could be taken."""


@dataclass(slots=True)
class ProgramState:
    """All that a program in progress has."""

    frames: list[FrameState]
    variables: dict[str, dict[str, Any]]
    """Data that is global in the program's modules."""
    functions: list[tuple[types.FunctionType, dict[str, Any]]]
    """Attributes of functions."""
    thread: dict[str, Any]
    random: Mapping[str, Any]
    epoch: int
    samples: int


class Snapshots:
    """The snapshots of one rank: rank 0 takes them, and all ranks can go on from one.

    Args:
        payload_fd: file of the call, from which its data is mapped.
        tell: sends a message to the driver.
        ask: does so and waits for the answer.
        at_home: classes that came with the call, with their ids.
        lengths: writes out what the program holds back, and returns the lengths of the files that it goes on writing.
    """

    def __init__(
        self,
        session: Session,
        place: SnapshotPlace,
        payload_fd: int,
        tell: Callable[[Mapping[str, Any]], None],
        ask: Callable[[dict[str, Any]], Any],
        at_home: Mapping[type, str],
        lengths: Callable[[], dict[str, int]],
    ) -> None:
        self._session, self._place, self._tell, self._ask = session, place, tell, ask
        self._at_home = at_home
        self._memory = CallMemory(payload_fd, place.folder.call)
        self._lengths = lengths
        self._every_s: float = session.config.snapshot_every_s or 0.0
        self._sources: dict[str, SourceFile] = {}
        self._globals: dict[str, dict[str, Any]] = {}
        self._functions: list[types.FunctionType] = []
        self._frames = ProgramFrames(self._sources, Snapshots.run.__code__)
        self._own: dict[int, str] = {}
        self._known: dict[str, Any] = {}
        self._number = place.resumed.number if place.resumed is not None else 0
        self._began = self._due_at = self._next_at = time.perf_counter() + self._every_s
        self._cost_s = 0.0
        self._child: int | None = None
        self._answer = -1
        self._resumed: ProgramState | None = None
        self._why = ""

    # The program

    def prepare(self, call: Call, known: Mapping[str, Any]) -> Callable[[], Any] | None:
        """Have the functions of ``call`` tell their positions; return the one to call if the run goes on.

        Args:
            known: objects of lagom's that the program may hold, by name.
        """
        self._known = dict(known)
        self._own = {id(value): name for name, value in known.items()}
        given = call.provided
        for value in reachable_modules(call.function, *given.values(), *given.get("hparams", {}).values()):
            if isinstance(value, types.FunctionType) and (text := call.sources.get(value.__code__.co_filename)):
                self._instrument(value, text)
        if self._place.resumed is None:
            return None
        state = self._resumed = self._load()
        for name, variables in state.variables.items():
            self._globals[name].update(variables)
        for function, attributes in state.functions:
            vars(function).update(attributes)
        self._session.samples_trained = state.samples
        self._session.passes.go_on(state.epoch, begun)
        return self._frames.call(state.frames, self._globals.__getitem__)

    def _instrument(self, function: types.FunctionType, text: str) -> None:
        code = function.__code__
        source = self._sources.get(code.co_filename)
        try:
            if source is None:
                source = SourceFile(code.co_filename, text)
            found = source.with_named_stack.get((code.co_qualname, code.co_firstlineno))
        except SyntaxError:
            return
        if found is None or found.co_freevars != code.co_freevars or not source.is_of(code):
            return
        self._sources[code.co_filename] = source
        self._globals.setdefault(function.__globals__["__name__"], function.__globals__)
        self._functions.append(function)
        function.__code__ = found

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have bars give iterators that can be kept, in the block."""
        with resumable_bars():
            yield

    def run(self, function: Callable[[], Any]) -> Any:
        """Call ``function``, the program or the rest of it; what is called by this method is the program."""
        state, self._resumed = self._resumed, None
        if state is not None:
            set_thread_state(state.thread)
            set_random_states(state.random)
            del state
        return function()

    # Passes of loaders

    def begin_pass(self, iterator: Any, loader: Any) -> None:
        """Note the states with which ``iterator`` begins a pass over ``loader``."""
        held = vars(iterator)
        # Workers end when both are dropped, so a loader that keeps its iterator is not held by it.
        held[LOADER] = weakref.ref(loader) if loader.persistent_workers else lambda: loader
        held[PASS_START] = pass_start(loader)

    # Taking

    def point(self, iterator: Any) -> None:
        """Take a snapshot if one is due: called before ``iterator`` gives the program a batch."""
        if self._session.rank != 0 or time.perf_counter() < self._next_at:
            return
        if self._child is not None:
            self._look()
            return
        if iterator._num_workers and iterator._num_yielded:
            return
        start = time.perf_counter()
        try:
            self._check_process()
            frames = self._frames.now(sys._getframe(1))
        except NoSnapshotError as error:
            self._put_off(str(error), time.perf_counter() - start)
            return
        self._take(frames, start)

    def _check_process(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise NoSnapshotError("a loader is read in a thread of the program's")
        if self._session.has_joined:
            raise NoSnapshotError("the program is distributed already")
        for thread in threading.enumerate():
            name = type(thread).__name__
            if thread is threading.main_thread() or thread.name.startswith(("lagom", "QueueFeeder")) or name == "TMonitor":
                continue
            raise NoSnapshotError(f"the program has a thread, {thread.name}")
        for module in ("mlflow", "wandb"):
            if module in sys.modules:
                raise NoSnapshotError(f"the program uses {module}")

    def _put_off(self, why: str, seconds: float) -> None:
        now = time.perf_counter()
        self._next_at = now + max(_PUT_OFF_S, seconds / _SHARE)
        if now - self._due_at > self._every_s and why != self._why:
            self._why = why
            self._tell({"type": "snapshot", "what": "none", "why": why})

    def _take(self, frames: Any, start: float) -> None:
        number = self._number = self._number + 1
        lengths = self._lengths()
        sys.stdout.flush()
        sys.stderr.flush()
        self._ask({"type": "snapshot", "what": "at", "number": number})
        progress = self._session.passes.progress
        facts = {
            "at": time.time(),
            "place": [progress["epoch"], progress["step"]],
            "lengths": lengths,
            "world_size": self._session.world_size,
        }
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._write_in_fork(number, frames, facts, writer)
        os.close(writer)
        self._child, self._answer = pid, reader
        self._cost_s += time.perf_counter() - start
        self._next_at = time.perf_counter() + 0.1

    def _write_in_fork(self, number: int, frames: Any, facts: dict[str, Any], writer: int) -> None:
        """Write the state as it was at the fork, and end."""
        answer: dict[str, Any] = {"number": number}
        try:
            os.nice(10)
            _let_go(writer)
            state = self._state(frames)
            answer |= self._write(number, state, facts)
        except BaseException as error:
            answer["why"] = _reason(error)
            if os.environ.get("LAGOM_SNAPSHOT_TRACE"):
                answer["trace"] = traceback.format_exc()
        finally:
            with contextlib.suppress(OSError):
                os.write(writer, json.dumps(answer).encode())
            os._exit(0)

    def _state(self, frames: Any) -> ProgramState:
        session = self._session
        return ProgramState(
            frames=self._frames.states(frames),
            variables={
                name: {key: value for key, value in variables.items() if not key.startswith("__") and is_data(value)}
                for name, variables in self._globals.items()
            },
            functions=[(function, dict(vars(function))) for function in self._functions if vars(function)],
            thread=thread_state(),
            random=random_states(),
            epoch=session.passes.progress["epoch"] or 0,
            samples=session.samples_trained,
        )

    def _write(self, number: int, state: ProgramState, facts: dict[str, Any]) -> dict[str, Any]:
        with program_globals(self._globals):
            try:
                pickled, buffers = pickle_state(state, self._at_home, self._reduce)
            except Exception as error:
                raise NoSnapshotError(self._name_culprit(state, error)) from error
        references, own = self._memory.split(buffers)
        head = json.dumps({"references": references}).encode()
        parcel = Parcel.of_parts(head, [memoryview(pickled), *own])
        folder = self._place.folder
        path = folder.partial(number)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        parcel.write(fd)
        os.fsync(fd)
        size = os.fstat(fd).st_size
        os.close(fd)
        folder.complete(number, {**facts, "number": number, "bytes": size})
        return {"bytes": size, "place": facts["place"], "at": facts["at"]}

    def _reduce(self, value: Any) -> Any:
        if (name := self._own.get(id(value))) is not None:
            return _known_object, (name,)
        return reduce_object(value)

    def _name_culprit(self, state: ProgramState, error: Exception) -> str:
        def can_pickle(value: object) -> bool:
            try:
                pickle_state(value, self._at_home, self._reduce)
            except Exception:
                return False
            return True

        named: dict[str, Any] = {}
        for frame in state.frames:
            named |= {f"{frame.position.function}()'s {name}": value for name, value in frame.values.items()}
            named |= {f"{frame.position.function}()'s shared {i}": one[2] for i, one in enumerate(frame.contents)}
        for module, variables in state.variables.items():
            named |= {f"{module}.{name}": value for name, value in variables.items()}
        with program_globals(self._globals):
            found = find_unpicklable(named, can_pickle)
        return f"{found or 'a part of the program'} cannot be kept: {' '.join(str(error).split())}"

    def _look(self) -> None:
        """See whether the fork has written its snapshot."""
        assert self._child is not None
        try:
            pid = os.waitpid(self._child, os.WNOHANG)[0]
        except ChildProcessError:  # the program has waited for it
            pid = self._child
        if pid == 0:
            self._next_at = time.perf_counter() + 0.1
            return
        answer = json.loads(os.read(self._answer, 1 << 16) or b'{"why": "the process that wrote it was killed"}')
        os.close(self._answer)
        self._child = None
        now = time.perf_counter()
        if "why" in answer:
            if "trace" in answer:
                log.warning("%s", answer["trace"])
            self._put_off(answer["why"], self._cost_s)
            return
        self._tell({"type": "snapshot", "what": "kept", **answer})
        self._due_at = self._next_at = max(now + self._every_s, self._began + self._cost_s / _SHARE)

    # Going on

    def _load(self) -> ProgramState:
        assert self._place.resumed is not None
        path = self._place.resumed.path
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        head, pickled, *own = parts_of(memoryview(mapped))
        buffers = self._memory.join(json.loads(bytes(head))["references"], own)
        global _loading  # what a pickle refers to while it is read
        _loading = self
        begun.clear()
        with program_globals(self._globals):
            state: ProgramState = unpickle_state(pickled, buffers)
        return state

    def known(self, name: str) -> Any:
        """Return the object of lagom's that the program knows, by name."""
        return self._known[name]


_loading: Snapshots | None = None


def _known_object(name: str) -> Any:
    assert _loading is not None
    return _loading.known(name)


def _let_go(kept: int) -> None:
    """Close what a fork shares with the rank's connections: they have to end with the rank."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            if fd > 2 and fd != kept and os.readlink(f"/proc/self/fd/{fd}").startswith(("socket:", "pipe:")):
                os.close(fd)


def _reason(error: BaseException) -> str:
    if isinstance(error, (NoSnapshotError, LagomError)):
        return str(error)
    return f"{type(error).__name__}: {error}"
