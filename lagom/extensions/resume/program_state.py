"""``ProgramInProgress``: the functions of a call, whose state can be read while they run, and put back elsewhere."""

from __future__ import annotations

import abc
import contextlib
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lagom.errors import LagomError, SnapshotError
from lagom.extensions.resume.exit_functions import ExitFunctions
from lagom.extensions.resume.frame_position import FramePosition, NoSnapshotError
from lagom.extensions.resume.frames import FrameState, ProgramFrames
from lagom.extensions.resume.learned_facts import LearnedFacts
from lagom.extensions.resume.object_reducers import reduce_object
from lagom.extensions.resume.passes.loader_passes import LoaderPasses
from lagom.extensions.resume.passes.loader_positions import forget_iterators
from lagom.extensions.resume.passes.worker_positions import WorkersInPassError
from lagom.extensions.resume.process_state import first_settings, process_state, set_process_state
from lagom.extensions.resume.progress_bars import resumable_bars
from lagom.extensions.resume.script_in_progress import ScriptInProgress
from lagom.extensions.resume.source_code import SourceFile, in_words, make_known
from lagom.extensions.resume.state_pickle import (
    globals_of,
    is_data,
    is_filled_cache,
    pickle_state,
    program_globals,
    unpickle_state,
)
from lagom.program.payload import unpack_parts
from lagom.program.script import Script
from lagom.program.signature import Call
from lagom.program.sources import imports_of, is_installed, reachable_modules
from lagom.program.unpicklable import find_unpicklable
from lagom.random_states import random_states, set_random_states

if TYPE_CHECKING:
    from lagom.session.session import Session


@dataclass(slots=True)
class ProgramState:
    """The state of a program in progress."""

    frames: list[FrameState]
    variables: dict[str, dict[str, Any]]
    """Global data of the program's modules, by module; of a script and its modules, all that they define."""
    functions: list[tuple[types.FunctionType, dict[str, Any], Any, Any]]
    """Attributes and defaults of functions."""
    classes: list[tuple[type, dict[str, Any]]]
    """Attributes of classes: data, and functions that the program has replaced."""
    process: dict[str, Any]
    settings: Any
    """Settings of libraries."""
    at_exit: Sequence[Any]
    random: Mapping[str, Any]
    progress: dict[str, int | None]
    samples: int
    beside: Any
    """Data that lagom keeps with the program's state."""
    services: Mapping[str, Any]
    """State of the services that the program uses, such as MLflow, by name."""
    learned: LearnedFacts


class ProgramInProgress:
    """The program of one rank.

    Args:
        own_classes: classes that came with the call, with the sender's ids for them.
        settings: two functions; the first returns the settings of libraries, the second sets them.
    """

    def __init__(
        self,
        session: Session,
        own_classes: Mapping[type, str],
        settings: tuple[Callable[[], Any], Callable[[Any], None]] = (dict, lambda _: None),
    ) -> None:
        self._session, self._own_classes = session, own_classes
        self.loaders = LoaderPasses(session)
        self._library_settings, self._set_library_settings = settings
        self._at_exit = ExitFunctions()
        self._sources: dict[str, SourceFile] = {}
        self._globals: dict[str, dict[str, Any]] = {}
        self._functions: list[types.FunctionType] = []
        self._classes: list[type] = []
        self._settings: dict[str, Any] = {}
        self._before: dict[str | type, dict[str, Any]] = {}
        self._imports: set[str] = set()
        self._streams: tuple[Any, Any] = sys.stdout, sys.stderr
        self._frames = ProgramFrames(self._sources, ProgramInProgress.run.__code__)
        self._script = ScriptInProgress(self._sources, self._globals)
        self._own: dict[int, str] = {}
        self._process: dict[str, Any] | None = None
        self._resumed: ProgramState | None = None
        self.beside: Callable[[], Any] = lambda: None
        """Returns data of lagom's to keep with the program's state."""
        self.services: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        """For each service that the program may use, such as MLflow, functions that return and set its state here."""
        self.found_beside: Any = None
        """Data that ``beside`` returned for the state from which this process goes on; None if it goes on from none."""

    def prepare(self, call: Call, known: Mapping[str, Any]) -> Callable[[], Any] | None:
        """Compile the functions of ``call`` anew, so that their positions can be read.

        Args:
            known: objects of lagom's that the program may hold, by name.

        Returns:
            The function that runs a script in place of ``call.function``; None if that is not a script.
        """
        make_known()
        if (shards := self._session.resumption.shards) is not None:
            known = {**known, "shards": shards}
        _known.clear()
        _known.update(known)
        self._own = {id(value): name for name, value in known.items()}
        given = call.provided
        for value in reachable_modules(call.function, *given.values(), *given.get("hparams", {}).values()):
            if type(value) is types.FunctionType:
                self._imports |= set(imports_of(value))
            if type(value) is types.FunctionType and (text := call.sources.get(value.__code__.co_filename)):
                self._instrument(value, text)
            elif any(type(value) is kind for kind in (type, abc.ABCMeta)) and not is_installed(_file_of(value)):
                self._classes.append(value)
        self._settings, self._streams = first_settings(), (sys.stdout, sys.stderr)
        self._before |= {name: dict(variables) for name, variables in self._modules([]).items()}
        self._before |= {kind: dict(vars(kind)) for kind in self._classes}
        return self._script.prepare(call.function) if isinstance(call.function, Script) else None

    def _instrument(self, function: types.FunctionType, text: str) -> None:
        code = function.__code__
        source = self._sources.get(code.co_filename)
        try:
            if source is None:
                source = SourceFile(code.co_filename, text)
            stack = source.with_named_stack.get((code.co_qualname, code.co_firstlineno))
        except SyntaxError:
            return
        if stack is None or stack.co_freevars != code.co_freevars or not (source.is_of(code) or stack == code):
            return
        self._sources[code.co_filename] = source
        self._globals.setdefault(function.__globals__["__name__"], function.__globals__)
        self._functions.append(function)
        function.__code__ = stack

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Patch tqdm's bars, ``atexit`` and a script's imports in the block, so that snapshots can keep their state."""
        with resumable_bars(), self._at_exit.noticed(), self._script.imports_noticed():
            yield

    def run(self, function: Callable[[], Any]) -> Any:
        """Call ``function``, the program or its rest; before the rest, restore the state of the process.

        The frames that this method calls are the program's.
        """
        state, self._resumed = self._resumed, None
        if state is not None:
            self._set_library_settings(state.settings)
            set_process_state(state.process, self._settings)
            self.loaders.restore(state.progress)
            self._session.progress.samples_trained = state.samples  # batches that were read again do not count
            self._at_exit.restore(state.at_exit)
            for name, service in state.services.items():
                self.services[name][1](service)
            set_random_states(state.random)
            del state
        return function()

    def note_process(self) -> None:
        """Note the settings of the process, before they are changed for pickling."""
        self._process = process_state(self._settings)

    def frames(self, frame: types.FrameType | None) -> list[tuple[types.FrameType, FramePosition]]:
        """Return the frames of the functions in progress that have called ``frame``, outermost first.

        Raises:
            NoSnapshotError: if one of them could not go on in another process.
        """
        return self._frames.now(frame)

    def pickle(
        self, frames: Sequence[tuple[types.FrameType, FramePosition]], iterator: Any
    ) -> tuple[bytes, list[memoryview]]:
        """Pickle the state of the program; return the pickle and its large buffers.

        Args:
            frames: the functions in progress.
            iterator: the loader's iterator from which the innermost function is about to take a batch.

        Raises:
            NoSnapshotError: if a part of the state cannot be kept; the text names the part.
        """
        imports = self._script.imports()
        state = self._state(frames, iterator)
        with program_globals(self._globals, self._script.modules):
            try:
                pickled, buffers = pickle_state(state, self._own_classes, self._reduce, self._gradient)
            except WorkersInPassError as error:
                raise NoSnapshotError(str(error)) from error
            except Exception as error:
                raise NoSnapshotError(self._name_culprit(state, error)) from error
        return pickle.dumps((imports, pickled)), buffers

    def restore(self, pickled: Any, buffers: Sequence[Any]) -> Callable[[], Any]:
        """Restore the objects that ``pickle`` has pickled; return the call with which ``run`` goes on from there.

        ``run`` restores the rest of the state: settings, iterators of loaders, random states.

        Raises:
            SnapshotError: if a function in progress is not in its source any more.
        """
        forget_iterators()
        imports, pickled = unpack_parts([pickled])
        if imports is not None:
            self._script.make_again(imports)
        with program_globals(self._globals):
            state: ProgramState = unpickle_state(pickled, buffers)
            if (shards := self._session.resumption.shards) is not None:
                shards.end_restore()
            self._check_sources(state.frames)
            for name, variables in state.variables.items():
                globals_of(name).update(variables)
        for function, attributes, defaults, by_keyword in state.functions:
            vars(function).update(attributes)
            function.__defaults__, function.__kwdefaults__ = defaults, by_keyword
        for kind, attributes in state.classes:
            for name, value in attributes.items():
                setattr(kind, name, value)
        state.learned.restore(self._session)
        self._session.progress.samples_trained, self.found_beside = state.samples, state.beside
        self._resumed = state
        call = self._frames.call(state.frames, self._globals.__getitem__)
        return call if imports is None else self._script.rest(call, state.frames[0].position.file)

    def _check_sources(self, frames: Sequence[FrameState]) -> None:
        for frame in frames:
            at = frame.position
            if at.file not in self._sources or self._sources[at.file].function_at(at.function, at.first_line) is None:
                raise SnapshotError(f"{at.function} in {at.file} is not as it was when the run began")

    def _state(self, frames: Any, iterator: Any) -> ProgramState:
        session = self._session
        if self._streams != (sys.stdout, sys.stderr):
            raise NoSnapshotError("the program has put another stream in the place of sys.stdout or sys.stderr")
        return ProgramState(
            frames=self._frames.states(frames, iterator),
            variables={
                name: self._data(name, variables)
                for name, variables in self._modules([one.f_locals for one, _ in frames]).items()
            },
            functions=[
                (one, dict(vars(one)), one.__defaults__, one.__kwdefaults__)
                for one in self._functions
                if vars(one) or one.__defaults__ or one.__kwdefaults__
            ],
            classes=[(kind, found) for kind in self._classes if (found := self._attributes(kind))],
            process=self._process or process_state(self._settings),
            settings=self._library_settings(),
            at_exit=self._at_exit.registered,
            random=random_states(),
            progress=session.passes.progress,
            samples=session.progress.samples_trained,
            beside=self.beside(),
            services=self._services(),
            learned=LearnedFacts.of(session),
        )

    def _services(self) -> dict[str, Any]:
        try:
            return {name: state() for name, (state, _) in self.services.items()}
        except LagomError as error:
            raise NoSnapshotError(str(error)) from error

    def _data(self, name: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return a module's variables that are data or were replaced; of a script's modules, all that they define."""
        if (all_of_them := self._script.kept(name, variables)) is not None:
            return all_of_them
        return {
            key: value
            for key, value in variables.items()
            if not key.startswith("__") and (is_data(value) or self._is_changed(name, key, value))
        }

    def _modules(self, variables: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the variables of the program's modules by name.

        These are the modules of its functions, those that they import, and all whose objects are in ``variables`` or in
        the variables of a module found so far.
        """
        modules = dict(self._globals)
        waiting = [*modules.values(), *variables, {name: sys.modules.get(name) for name in self._imports}]
        while waiting:
            for value in list(waiting.pop().values()):
                module = _own_module(value)
                if module is not None and module.__name__ not in modules:
                    modules[module.__name__] = vars(module)
                    waiting.append(vars(module))
        return modules

    def _is_changed(self, owner: str | type, name: str, value: Any) -> bool:
        """Return whether ``name`` of ``owner``, a module or class, had another value or none before the program ran."""
        return owner in self._before and self._before[owner].get(name) is not value

    def _attributes(self, kind: type) -> dict[str, Any]:
        """Return a class's attributes that are data or were replaced, and filled caches, which pickling refuses."""
        found = {name: value for name, value in vars(kind).items() if not name.startswith(("__", "_abc_"))}
        return {
            name: value
            for name, value in found.items()
            if (is_data(value) and not hasattr(value, "__get__"))
            or is_filled_cache(value)
            or self._is_changed(kind, name, value)
        }

    def _reduce(self, value: Any) -> Any:
        if (name := self._own.get(id(value))) is not None:
            return _known_object, (name,)
        found = NotImplemented if (shards := self._session.resumption.shards) is None else shards.reduce(value)
        return reduce_object(value) if found is NotImplemented else found

    def _gradient(self, leaf: Any) -> Any:
        shards = self._session.resumption.shards
        return None if shards is None else shards.gradient(leaf)

    def _name_culprit(self, state: ProgramState, error: Exception) -> str:
        def can_pickle(value: object) -> bool:
            try:
                pickle_state(value, self._own_classes, self._reduce, self._gradient)
            except Exception:
                return False
            return True

        named: dict[str, Any] = {}
        for frame in state.frames:
            named |= {f"{frame.position.function}()'s {in_words(name)}": one for name, one in frame.values.items()}
            named |= {f"{frame.position.function}()'s shared {i}": one[2] for i, one in enumerate(frame.contents)}
        for module, variables in state.variables.items():
            named |= {f"{module}.{name}": value for name, value in variables.items()}
        culprit = find_unpicklable(named, can_pickle)
        return f"{culprit or 'a part of the program'} cannot be kept: {' '.join(str(error).split())}"


def _own_module(value: Any) -> types.ModuleType | None:
    """Return the program's module that ``value`` is, or that defines it or its class; None for other modules."""
    if isinstance(value, types.ModuleType):
        name = value.__name__
    else:
        name = (value if isinstance(value, (type, types.FunctionType)) else type(value)).__module__
    if not isinstance(name, str) or name.partition(".")[0] in ("lagom", "__main__", "builtins"):
        return None
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return module if isinstance(module, types.ModuleType) and file and not is_installed(file) else None


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


_known: dict[str, Any] = {}
"""Objects of lagom's that the program of this process may hold, by name."""


def _known_object(name: str) -> Any:
    return _known[name]
