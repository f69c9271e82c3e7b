"""``keep_call`` and ``read_call``: the call of a run in its folder, so that another process can go on with the run.

``keep_result`` and ``read_result``: the result of a run that has ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lagom.config import TorchDistributedConfig
from lagom.config.trials import JOURNAL
from lagom.digests import end_with_digest, ended_digest
from lagom.errors import LagomError, PayloadError, PlanError
from lagom.extensions.resume.source_code import SourceFile
from lagom.plan import Plan
from lagom.program.payload import Parcel, unpack_file
from lagom.program.script import Script
from lagom.program.signature import Call
from lagom.program.sources import reachable_modules, source_text
from lagom.restart.kept_snapshots import CALL, RESULT, SETTINGS, SnapshotFolder, no_snapshots
from lagom.run_folder import RunFolder
from lagom.watch.run_dir import RunRecords

if TYPE_CHECKING:
    from lagom.speed import Speed
    from lagom.whole_modules import WholeModule

NO_FOLDER = "snapshot_every_s needs a folder for the run; set run_dir to a path or a URL"
_DATA: dict[str, Any] = {"module": None, "train_set": None, "test_set": None, "dataset": None, "hparams": {}}
"""Fields of a config that travel in the call, with the empty values that they have in the kept config."""


@dataclass(frozen=True, slots=True)
class KeptRun:
    """Facts of a run beside its call: the config without its data, and where it was called."""

    config: TorchDistributedConfig
    name: str
    cwd: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    source: str | None


def obstacle(plan: Plan, call: Call) -> str | None:
    """Return the reason why a run of ``call`` under ``plan`` cannot keep snapshots; None if it can."""
    config = plan.config
    if not call.sources:
        return "the source of the function is not known"
    if sys.version_info < (3, 11):
        return "Python 3.10 does not tell at which part of a line a function is; use 3.11 or newer"
    if plan.already_distributed:
        return "the program is distributed by itself, so each rank has a state of its own"
    if config.batches != "whole" or config.backend != "torch" or config.evaluation == "sharded":
        return "ranks have states of their own; with batches='whole' and backend='torch' all have the same"
    if plan.launcher == "inline":
        return "with launcher='inline' the ranks are the calling process, and end with it"
    return None


def keep_call(records: RunRecords | None, plan: Plan, call: Call, source: str | None) -> SnapshotFolder | None:
    """Write ``call`` into the run's folder if it is to keep snapshots; return the folder for them, else None.

    If the run cannot keep the snapshots that it is to keep, tell the user why.

    Raises:
        PlanError: if snapshots are asked for and the run has no folder.
        PayloadError: if ``call`` cannot be pickled.
    """
    if plan.config.snapshot_every_s is None:
        return None
    if records is None:
        raise PlanError(NO_FOLDER)
    why = obstacle(plan, call)
    if why is None and not records.run_folder.is_own:
        why = f"others can write to {records.folder}, and a snapshot is a pickle; set run_dir to another disk"
    if why is not None:
        records.note("without_snapshots", why)
        sys.stderr.write(f"lagom: {plan.name}: no snapshots: {why}\n")
        return None
    folder = SnapshotFolder.of(records.run_folder, make=True)
    config, argv = dataclasses.replace(plan.config, **_DATA), tuple(sys.argv)
    if records.upload is not None:  # the query may hold a secret
        _, mark, query = os.fspath(config.run_dir or "").partition("?")
        config = dataclasses.replace(config, run_dir=records.upload.url)
        argv = tuple(word.replace(mark + query, "") if query else word for word in argv)
    path = tuple(os.path.abspath(entry) for entry in sys.path)
    run = KeptRun(config, plan.name, os.getcwd(), path, argv, source)
    _write(folder.folder, SETTINGS, run)
    write_call(folder, call)
    return folder


def write_call(folder: SnapshotFolder, call: Call) -> None:
    """Write ``call`` to the file to which snapshots refer for its data."""
    folder.call_sha256 = _write(folder.folder, CALL, call)


@contextmanager
def read_call(folder: RunFolder) -> Iterator[tuple[KeptRun, Call, SnapshotFolder]]:
    """Read what ``keep_call`` has written; in the context, the working directory is the one of the original call.

    ``sys.path`` has the entries of that call as well.

    Raises:
        LagomError: if there is no call, or no such working directory; if other users can write to the call, or it is
            damaged; or if functions have changed since, unless the run has ended.
    """
    folder.check_own()
    if folder.exists(JOURNAL):
        raise LagomError(
            f"{folder.path} is a search or an ablation study: call it again with resume= in its config; in the "
            "terminal a search goes on by lagom search --resume FOLDER"
        )
    try:
        snapshots = SnapshotFolder.of(folder)
    except OSError as error:
        raise LagomError(no_snapshots(folder.path)) from error
    try:
        snapshots.check_owner()
        run: KeptRun = _read(snapshots, SETTINGS)
    except FileNotFoundError as error:
        raise LagomError(no_snapshots(folder.path)) from error
    before, path = os.getcwd(), list(sys.path)
    try:
        os.chdir(run.cwd)
    except OSError as error:
        raise LagomError(f"the run was called in {run.cwd}, which is not there any more: {error}") from error
    try:
        sys.path += [entry for entry in run.sys_path if entry not in sys.path]
        call: Call = _read(snapshots, CALL)
        has_ended = snapshots.has_result()
        if not has_ended and (changed := sorted(_changed_functions(call))):
            raise LagomError(
                f"{', '.join(changed)}: not as when the run began, so it cannot go on; put the old source back, "
                "or begin a new run"
            )
        if not has_ended and (edited := sorted(_edited_files(call))):
            have = "have" if len(edited) > 1 else "has"
            sys.stderr.write(
                f"lagom: {run.name}: {', '.join(edited)} {have} been edited since the run began; the run goes on as "
                "it was, so begin a new run for the new code\n"
            )
        yield run, call, snapshots
    finally:
        os.chdir(before)
        sys.path[:] = path


def keep_result(
    folder: SnapshotFolder,
    value: Any,
    values: list[Any],
    timings: dict[str, float],
    whole: list[WholeModule],
    speed: Speed | None,
) -> None:
    """Write the result of a run and remove its snapshots; keep them if the result cannot be pickled or written."""
    with suppress(PayloadError, OSError):  # then the snapshots stay, from which ``resume`` computes the result again
        _write(folder.folder, RESULT, (value, values, timings, whole, speed))
        folder.remove_all()  # the run has ended, so nothing resumes from its snapshots


KeptResult: TypeAlias = "tuple[Any, list[Any], dict[str, float], list[WholeModule], Speed | None]"
"""Value, values of all ranks, timings, modules that ran whole, and speed."""


def read_result(folder: SnapshotFolder) -> KeptResult | None:
    """Return what ``keep_result`` has written; None if the run has not ended."""
    if not folder.has_result():
        return None
    found: KeptResult = _read(folder, RESULT)
    return found


def _changed_functions(call: Call) -> Iterator[str]:
    """Yield the functions of ``call`` that differ from its kept sources, and other kept files that have changed."""
    if isinstance(call.function, Script):  # the call holds the script, and the snapshot the modules that it imported
        return
    sources: dict[str, SourceFile] = {}
    for function in _functions(call):
        name = function.__code__.co_filename
        if name not in sources:
            sources[name] = SourceFile(name, call.sources[name])
        if not sources[name].is_of(function.__code__):
            yield f"{function.__qualname__}() in {name}"
    for name, text in call.sources.items():
        if name not in sources and os.path.isfile(name) and source_text(Path(name)) != text:
            yield name


def _edited_files(call: Call) -> set[str]:
    """Return the scripts of which ``call`` holds what they had when the run began, and that have changed since."""
    if isinstance(call.function, Script):
        return {call.function.file} if call.function.is_edited() else set()
    names = {one.__code__.co_filename for one in _functions(call) if one.__module__ == "__main__"}
    return {name for name in names if os.path.isfile(name) and _lines_of(name) != call.sources[name].splitlines()}


def _lines_of(name: str) -> list[str]:
    return (source_text(Path(name)) or "").splitlines()


def _functions(call: Call) -> Iterator[types.FunctionType]:
    """Yield the functions of ``call`` whose sources it has."""
    given = call.provided
    for value in reachable_modules(call.function, *given.values(), *given.get("hparams", {}).values()):
        is_named = issubclass(type(value), types.FunctionType) and value.__name__ != "<lambda>"
        if is_named and value.__code__.co_filename in call.sources:
            yield value


def _write(folder: RunFolder, name: str, value: Any) -> str:
    """Write the pickle of ``value``, with its digest at the end; return the digest."""
    parcel, digest = Parcel(value), hashlib.sha256()
    with folder.replacing(name) as fd:
        parcel.write(fd, digest)
        end_with_digest(fd, digest.hexdigest())
    return digest.hexdigest()


def _read(folder: SnapshotFolder, name: str) -> Any:
    """Return the value that ``_write`` has written.

    Raises:
        OSError: if there is no such file.
        LagomError: if other users can write to it, or it is damaged.
    """
    try:
        fd = folder.folder.open_file(name, own=True)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LagomError(f"{folder.path}/{name} is damaged: {error}") from error
    try:
        digest = ended_digest(fd)
        if name == CALL:
            folder.call_sha256 = digest
        return unpack_file(fd)
    except ValueError as error:
        raise LagomError(f"{folder.path}/{name} is damaged: {error}") from error
    finally:
        os.close(fd)
