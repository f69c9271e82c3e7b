"""``ProgramFrames``: the frames of a running program, read in one process and made anew in another."""

from __future__ import annotations

import ast
import builtins
import functools
import gc
import types
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lagom.extensions.resume.continuation import (
    ResumedFrame,
    check_continuation,
    continuation_code,
    first_parameter,
    script_code,
)
from lagom.extensions.resume.frame_position import FramePosition, NoSnapshotError, place_of, position_of
from lagom.extensions.resume.progress_bars import BarIterator
from lagom.extensions.resume.remaining_statements import HELP
from lagom.extensions.resume.source_code import (
    MARK,
    Function,
    ScriptVariables,
    SourceFile,
    iterator_name,
    iterator_of,
    manager_name,
)
from lagom.extensions.resume.state_pickle import cell_contents, fill_cells

_GENERATORS = 0x20 | 0x80 | 0x200  # generators, coroutines, asynchronous generators
_PLAIN = (int, float, complex, str, bytes, type(None))
"""Kinds of values that no call can change."""
_PASSED = (
    "/lagom/batches/",
    "/lagom/session/events.py",
    "/lagom/watch/spans.py",
    "/lagom/extensions/observe/timeline/program_spans.py",
    "/lagom/extensions/resume/",
    "/lagom/extensions/verify/on_rank/",
    "/lagom/program/script.py",
    "/torch/utils/data/dataloader.py",
    "/tqdm/std.py",
)
"""Parts of the paths of files whose frames are passed over: they need no state, or it is saved with an iterator."""


@dataclass(slots=True)
class FrameState:
    """A function in progress: its position and its variables."""

    position: FramePosition
    module: str
    """The ``__name__`` of its globals."""
    values: dict[str, Any]
    cells: dict[str, types.CellType]
    """Variables that the function shares with functions defined in it or around it."""
    contents: Sequence[tuple[types.CellType, bool, Any]]
    """Each cell, whether it has a value, and the value."""


class ProgramFrames:
    """Reads the frames of the program: those of functions in ``sources`` that the frame of ``boundary`` has called.

    Args:
        sources: the program's source files, by name.
        boundary: code of lagom's function that calls the program.
    """

    def __init__(self, sources: Mapping[str, SourceFile], boundary: types.CodeType) -> None:
        self._sources, self._boundary = sources, boundary
        self._checked: dict[tuple[types.CodeType, int, bool], tuple[FramePosition, set[str]]] = {}

    def now(self, frame: types.FrameType | None) -> list[tuple[types.FrameType, FramePosition]]:
        """Return the frames of the program from ``frame`` outwards with their positions, outermost first.

        Raises:
            NoSnapshotError: if one of them could not go on in another process, or a library's frame is among them.
        """
        positions: list[tuple[types.FrameType, FramePosition]] = []
        while frame is not None and frame.f_code is not self._boundary:
            name = frame.f_code.co_filename
            if name in self._sources:
                positions.append((frame, self._position(frame, is_innermost=not positions)))
            elif not any(part in name for part in _PASSED) and not self._is_help(frame):
                raise NoSnapshotError(f"{place_of(frame)} is between the program and its loader")
            frame = frame.f_back
        if frame is None or not positions:
            raise NoSnapshotError("no function of the program's own is running")
        return positions[::-1]

    def _is_help(self, frame: types.FrameType) -> bool:
        return HELP in frame.f_code.co_varnames

    def _position(self, frame: types.FrameType, is_innermost: bool) -> FramePosition:
        key = frame.f_code, frame.f_lasti, is_innermost
        if key not in self._checked:
            self._checked[key] = self._find_position(frame, is_innermost)
        found, read = self._checked[key]
        values = frame.f_locals if read else {}
        for name in read:
            if name in values and not isinstance(values[name], _PLAIN):
                kind = type(values[name]).__name__
                raise NoSnapshotError(f"{place_of(frame)} has read {name} (a {kind}) before its call")
        return found

    def _find_position(self, frame: types.FrameType, is_innermost: bool) -> tuple[FramePosition, set[str]]:
        code, source = frame.f_code, self._sources[frame.f_code.co_filename]
        if code.co_flags & _GENERATORS:
            raise NoSnapshotError(f"{place_of(frame)} is a generator")
        function = source.function(code)
        if function is None:
            raise NoSnapshotError(
                f"{place_of(frame)} is no function of its own, but a lambda, comprehension or class body"
            )
        position = position_of(frame, source)
        node = position.node(source)
        assert node is not None
        if not is_innermost and position.is_loop:
            raise NoSnapshotError(f"{place_of(frame)} iterates over an iterator of the program's own")
        if (
            is_innermost
            and isinstance(node, ast.Call)
            and not (isinstance(node.func, ast.Name) and node.func.id == "next")
        ):
            raise NoSnapshotError(f"{place_of(frame)} calls a library that reads the loader")
        read = check_continuation(source, function, node, is_innermost)
        missing = set(_stack_names(source, function, node)) - {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        if missing and not isinstance(function, ast.Module):
            raise NoSnapshotError(f"{place_of(frame)} calls locals(), or was defined after the run had begun")
        return position, read

    def states(self, frames: Sequence[tuple[types.FrameType, FramePosition]], iterator: Any) -> list[FrameState]:
        """Return the states of ``frames``, the innermost of which is about to take an item of ``iterator``.

        The states keep the program's variables alive.

        Raises:
            NoSnapshotError: if the innermost takes it by more than bars, ``enumerate`` and the first part of a ``zip``.
        """
        found = [self._state(frame, position) for frame, position in frames]
        frame, position = frames[-1]
        node = position.node(self._sources[position.file])
        values = ChainMap(self._own(frame), frame.f_globals)
        if isinstance(node, ast.For):
            read = iterator_of(values.get(iterator_name(node)))
        else:
            name = node.args[0] if node is not None and node.args else None
            read = values.get(name.id) if isinstance(name, ast.Name) else None
        if not _reads_next(read, iterator):
            raise NoSnapshotError(f"{place_of(frame)} reads the loader through a {type(read).__name__}")
        return found

    def _state(self, frame: types.FrameType, position: FramePosition) -> FrameState:
        code, values, source = frame.f_code, dict(self._own(frame)), self._sources[position.file]
        function, node = source.function(code), position.node(source)
        assert function is not None
        assert node is not None
        # A loop or block that an exception has left still has its variable, which nothing reads.
        unused = {name for name in values if name.startswith(MARK)} - {*_stack_names(source, function, node)}
        shared = {*code.co_cellvars, *code.co_freevars}
        cells = _cells(frame, values, shared) if shared else {}
        own = {name: value for name, value in values.items() if name not in shared | unused}
        return FrameState(position, frame.f_globals["__name__"], own, cells, cell_contents(cells))

    def _own(self, frame: types.FrameType) -> dict[str, Any]:
        """Return the variables of ``frame``; of a script the iterators and managers, since its variables are global."""
        source = self._sources[frame.f_code.co_filename]
        is_script = isinstance(source.function(frame.f_code), ast.Module)
        return ScriptVariables.kept if is_script else frame.f_locals

    def call(self, states: Sequence[FrameState], module: Callable[[str], dict[str, Any]]) -> Callable[[], Any]:
        """Return a call that goes on with the functions in progress, and returns what the outermost one returns.

        Args:
            module: returns the globals of a module by its name.
        """
        call: Callable[[], Any] | None = None
        for state in reversed(states):
            fill_cells(state.contents)
            source, at = self._sources[state.position.file], state.position
            node = at.node(source)
            function = source.function_at(at.function, at.first_line)
            assert node is not None
            assert function is not None
            if isinstance(function, ast.Module):
                code = script_code(source, node, call is None)
                call = functools.partial(_run_rest_of_script, code, module(state.module), state.values, call)
                continue
            code = continuation_code(source, function, node, call is None, list(state.values), list(state.cells))
            closure = tuple(state.cells[name] for name in code.co_freevars)
            resumed = types.FunctionType(code, module(state.module), at.function, None, closure)
            first = [state.values[name] for name in first_parameter(function, state.cells)]
            call = functools.partial(resumed, *first, ResumedFrame(state.values, call))
        assert call is not None
        return call


def _run_rest_of_script(
    code: types.CodeType, variables: dict[str, Any], kept: dict[str, Any], call: Callable[[], Any] | None
) -> None:
    """Run the rest of a script."""
    ScriptVariables.kept.clear()
    ScriptVariables.kept.update(kept)
    setattr(builtins, HELP, ResumedFrame({}, call))
    exec(code, variables)


def _reads_next(outer: Any, iterator: Any) -> bool:
    """Return whether ``outer`` is ``iterator``, or reads it through bars, ``enumerate`` and the first of a ``zip``."""
    while outer is not iterator:
        if isinstance(outer, BarIterator):
            outer = outer.source.iterator
        elif type(outer) in (enumerate, zip):  # a zip that reads a later part already holds an item
            outer = outer.__reduce__()[1][0]
        else:
            return False
    return True


def _stack_names(source: SourceFile, function: Function, node: ast.AST) -> list[str]:
    """Return the variables for the iterators and managers that are in use at ``node``."""
    chain = source.chain(node, function) or []
    names = []
    for above, below in zip(chain, [*chain[1:], None], strict=True):
        is_body = below is None or source.parents[below][1] == "body"
        if isinstance(above, ast.For) and is_body:
            names.append(iterator_name(above))
        elif isinstance(above, ast.With) and is_body:
            names += [manager_name(above, number) for number in range(len(above.items))]
    return names


def _cells(frame: types.FrameType, values: Mapping[str, Any], names: set[str]) -> dict[str, types.CellType]:
    """Return the cells of ``frame``, which it shares with functions defined in it, or with the function around it."""
    cells: dict[str, types.CellType] = {}
    for function in gc.get_objects():
        if type(function) is not types.FunctionType or not names & {*function.__code__.co_freevars}:
            continue
        if function.__code__.co_filename != frame.f_code.co_filename:
            continue
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name in names and name not in cells and _holds(cell, values, name) and _is_of(frame, name, cell):
                cells[name] = cell
    # A variable that no living function shares is the frame's alone.
    return {name: cells[name] if name in cells else _new_cell(values, name) for name in names}


def _holds(cell: types.CellType, values: Mapping[str, Any], name: str) -> bool:
    try:
        value = cell.cell_contents
    except ValueError:
        return name not in values
    return name in values and value is values[name]


def _is_of(frame: types.FrameType, name: str, cell: types.CellType) -> bool:
    """Return whether ``cell`` is the frame's own, in which ``frame`` sees a change, not another with the same value."""
    is_full = name in frame.f_locals
    before, mark = cell.cell_contents if is_full else None, object()
    try:
        cell.cell_contents = mark
        return frame.f_locals.get(name) is mark
    finally:
        if is_full:
            cell.cell_contents = before
        else:
            del cell.cell_contents


def _new_cell(values: Mapping[str, Any], name: str) -> types.CellType:
    return types.CellType(values[name]) if name in values else types.CellType()
