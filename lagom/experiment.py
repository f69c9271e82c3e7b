"""``lagom(train, config)``: validate, plan, launch, aggregate, return; ``resume`` goes on with a run from snapshots."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any, overload

from lagom.config import AblationConfig, HyperparameterOptConfig, TorchDistributedConfig
from lagom.config.torch_distributed import Launcher
from lagom.driver.aggregate import aggregate, remedy
from lagom.driver.attempts import run_attempts
from lagom.driver.failure import add_advice
from lagom.driver.preparation import checked, facts_of_code, random_start, run_records, source_of
from lagom.driver.protocol import Launcher as Launches
from lagom.extensions.registry import attempts, replaced_arguments
from lagom.extensions.resume.kept_call import KeptRun, keep_call, keep_result, read_call, read_result
from lagom.extensions.search.ablate import ablate
from lagom.extensions.search.ablation_result import AblationResult
from lagom.extensions.search.search import search
from lagom.extensions.search.search_result import SearchResult
from lagom.extensions.verify.rehearsals import verify
from lagom.extensions.verify.verification import say_not_rehearsed, show
from lagom.launch import choose
from lagom.on_rank.process_settings import process_settings
from lagom.plan import Plan, plan
from lagom.program.call import Call
from lagom.program.failure_advice import advice
from lagom.program.own_frames import cut_own_frames
from lagom.program.signature import function_name
from lagom.program.sources import source_files
from lagom.random_states import set_random_states
from lagom.restart.kept_snapshots import FOLDER, SnapshotFolder
from lagom.restart.snapshot_copies import SnapshotCopies
from lagom.result import Result
from lagom.run_folder import RunFolder
from lagom.timings import DIGITS, Timings
from lagom.watch.run_dir import RunRecords
from lagom.watch.runs import open_run
from lagom.watch.upload import Upload, is_url


@overload  # a search is a run, too, with a result of its own
def lagom(  # type: ignore[overload-overlap]
    train: Callable[..., Any], config: HyperparameterOptConfig
) -> SearchResult: ...


@overload
def lagom(  # type: ignore[overload-overlap]
    train: Callable[..., Any], config: AblationConfig
) -> AblationResult: ...


@overload
def lagom(train: Callable[..., Any], config: TorchDistributedConfig) -> Result: ...


def lagom(train: Callable[..., Any], config: TorchDistributedConfig) -> Result | SearchResult:
    """Run ``train`` on every rank, as one machine would have run it, and return its value; or run many trials.

    Args:
        train: an ordinary training function of one process. It gets by keyword what its signature names:
            ``module``, ``hparams``, ``train_set``, ``test_set``, ``dataset``, ``reporter``, and any key of ``hparams``.
        config: the arguments for the function, and the number and place of ranks.

    Returns:
        The result: ``result["test result"]`` is the value, ``result.per_rank`` each rank's own value. With a
        ``HyperparameterOptConfig``, the trials: ``result.best_config``, ``result.best_value``, ``result.trials``. With
        an ``AblationConfig``, what each component is worth: ``result.effects``.

    Raises:
        ValueError: if the call is wrong, such as an argument that nothing provides; no rank has been started then.
        PlanError: if the run does not fit the cluster.
        DataError: if a data set cannot be read.
        PayloadError: if function, data or result cannot be pickled.
        VerificationError: with ``verify=True``, if the ranks would not compute what one process does.
        RankError: if a rank called ``sys.exit``, or ranks were killed more often than ``max_failures``.
        StallError: if a rank made no progress for ``timeout_s``.
        LagomError: for other failures of lagom or Spark; a base class of all errors above but ValueError.
        Exception: the function's own exception, with the rank's traceback as its cause.
    """
    if isinstance(config, HyperparameterOptConfig):
        return search(train, config)
    if isinstance(config, AblationConfig):
        return ablate(train, config)
    timings = Timings()
    provided = checked(train, config)
    launcher = choose(config.launcher)
    name = function_name(train)
    cluster = launcher.cluster()
    the_plan = plan(config, cluster, name, **facts_of_code(train, provided, cluster))
    timings.end("prepare")
    written = replaced_arguments(provided)
    timings.end("frame" if written is not provided else "prepare")
    call = Call(
        function=train,
        provided=written,
        random_states=random_start(config),
        settings=process_settings(),
        sources=source_files(train, *provided.values(), *config.hparams.values())
        if config.snapshot_every_s is not None
        else {},
    )
    if config.verify and the_plan.world_size > 1:
        if the_plan.already_distributed:
            say_not_rehearsed(name)
        else:
            timings.end("prepare")
            show(verify(launcher, the_plan, call))
            timings.end("verify")
    with run_records(config, the_plan, launcher.where(), source_of(train), began=timings.began) as records:
        snapshots = keep_call(records, the_plan, call, source_of(train))
        with _kept_for(snapshots, records):
            try:
                return _run(launcher, the_plan, call, records, snapshots, timings)
            except (Exception, KeyboardInterrupt) as error:
                _cut_frames(error, the_plan)
                raise error  # in Python 3.10, a bare raise would restore the frames


def resume(
    run_dir: str | os.PathLike[str], *, world_size: int | None = None, launcher: Launcher | None = None
) -> Result:
    """Go on with a run that has kept snapshots, from the last one, and return its result as ``lagom`` would have.

    If the run has already returned, nothing is computed, and the result is the one that it returned.

    Args:
        run_dir: the folder of the run, or its URL (``result.run_url``), or a part of its name in the default folder.
        world_size: number of ranks; None: as before.
        launcher: where the ranks run; None: as before.

    Raises:
        LagomError: if the run has kept no snapshots, is still running in another process, or has functions that have
            changed since; or if other users can write to the snapshots. This check is for folders alone: code in
            snapshots at a URL runs as this user, whoever has written them.
        ValueError: if there is no such run.
        Exception: as ``lagom``.
    """
    timings = Timings()
    with _kept_run(run_dir) as (folder, run, call, snapshots, upload):
        if (kept := read_result(snapshots)) is not None:
            value, values, parts = kept
            sys.stderr.write(f"lagom: {run.name}: the run had ended already; nothing is computed again\n")
            seconds = round(sum(parts.values()), DIGITS)
            return Result(
                value,
                values,
                seconds=seconds,
                timings=parts,
                name=run.name,
                where="",
                run_dir=folder.path,
                upload=upload,
            )
        changed: dict[str, Any] = {"world_size": world_size, "launcher": launcher}
        config = replace(run.config, **{name: value for name, value in changed.items() if value is not None})
        chosen = choose(config.launcher)
        cluster = chosen.cluster()
        facts = facts_of_code(call.function, call.provided, cluster) | {"already_distributed": False}
        the_plan = plan(config, cluster, run.name, **facts)
        began = timings.began
        with run_records(config, the_plan, chosen.where(), run.source, folder, upload, began=began) as records:
            timings.add_earlier(records.earlier_s if records is not None else 0.0)
            try:
                return _run(chosen, the_plan, call, records, snapshots, timings)
            except (Exception, KeyboardInterrupt) as error:
                _cut_frames(error, the_plan)
                raise error  # as in lagom()


@contextmanager
def _kept_run(
    run_dir: str | os.PathLike[str],
) -> Iterator[tuple[RunFolder, KeptRun, Call, SnapshotFolder, Upload | None]]:
    """Lock a run for this process in the context, and yield its folder, facts, call, snapshots and upload.

    A run at a URL is first copied to this machine; other runs have None in place of the upload.
    """
    if not is_url(run_dir):
        found = open_run(run_dir, TorchDistributedConfig().run_dir)
        with read_call(found) as (run, call, snapshots), snapshots.locked():
            yield found, run, call, snapshots, None
        return
    upload = Upload.again(os.fspath(run_dir))
    copies = SnapshotCopies(upload.file_system, upload.root, upload.url)
    try:
        with (
            copies.going_on(SnapshotFolder(str(upload.folder / FOLDER)), is_new=False),
            read_call(folder := RunFolder.open(upload.folder)) as (run, call, snapshots),
        ):
            upload.fetch()
            copies.fetch_newest()
            yield folder, run, call, snapshots, upload
    finally:
        if copies.failed:
            upload.keep()


@contextmanager
def _kept_for(snapshots: SnapshotFolder | None, records: RunRecords | None) -> Iterator[None]:
    """Lock the run's snapshots in the context, so that no other process goes on from them.

    If the run's records go to a URL, copy the snapshots there. Do nothing for a run without snapshots.
    """
    with ExitStack() as stack:
        if snapshots is not None:
            stack.enter_context(snapshots.locked())
            upload = records.upload if records is not None else None
            if upload is not None:
                copies = SnapshotCopies(upload.file_system, upload.root, upload.url)
                stack.callback(lambda: upload.keep() if copies.failed else None)
                stack.enter_context(copies.going_on(snapshots, is_new=True))
        yield


def _cut_frames(error: BaseException, the_plan: Plan) -> None:
    """Remove lagom's frames from a traceback, and add advice to an error of the program in this process.

    After Ctrl-C remove all, unless the program runs in this process: they say how this process waits for the ranks.
    """
    if the_plan.launcher == "inline":  # else the rank has given advice
        add_advice(error, advice(error, the_plan.packages, already_distributed=the_plan.already_distributed))
    if isinstance(error, KeyboardInterrupt) and the_plan.launcher != "inline":
        error.__traceback__ = None
    else:
        cut_own_frames(error)


def _run(
    launcher: Launches,
    the_plan: Plan,
    call: Call,
    records: RunRecords | None,
    snapshots: SnapshotFolder | None,
    timings: Timings,
) -> Result:
    with attempts(call.provided, snapshots):
        timings.end("prepare")
        outcomes, failures = run_attempts(launcher, the_plan, call, records, snapshots, timings)
        returned = [outcome.load() for outcome in outcomes]
        value, values = _values(returned, the_plan)
        for part, seconds in returned[0].get("timings", {}).items():
            timings.end(part, seconds)
        timings.end("collect")
        if snapshots is not None:
            keep_result(snapshots, value, values, timings.parts())
    if changed := returned[0].get("changed"):
        _say_changed(changed, the_plan.name, records)
    if records is not None:
        ended = {"outcome": "returned", "value": value, "per_rank": values}
        records.ended(ended, timings.seconds(), timings.parts())
    return Result(
        value,
        values,
        seconds=timings.seconds(),
        timings=timings.parts(),
        name=the_plan.name,
        where=launcher.where(),
        run_dir=records.folder if records is not None else None,
        upload=records.upload if records is not None else None,
        failures=failures,
    )


def _values(returned: Sequence[Mapping[str, Any]], the_plan: Plan) -> tuple[Any, list[Any]]:
    """Return the run's value and the values of all ranks; set this process's generators to rank 0's final states."""
    values = [one["value"] for one in returned]
    advice = "" if the_plan.already_distributed else remedy(the_plan.config.batches, the_plan.config.evaluation)
    value = aggregate(values, [one["samples"] for one in returned], f"{advice}result.per_rank has all of them")
    if (states := returned[0].get("random")) is not None:
        set_random_states(states)
    return value, values


def _say_changed(names: Sequence[str], name: str, records: RunRecords | None) -> None:
    """Say which of the caller's objects the function has changed on the ranks, and that they are as before here."""
    shown = [*names[:_MAX_NAMES], *([f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else [])]
    what = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
    yours = "yours are as before: return them" if len(names) > 1 else "yours is as before: return it"
    text = f"lagom: {name}: changed {what} on the ranks; {yours}"
    sys.stderr.write(f"{text}\n")
    if records is not None:
        records.said(text)


_MAX_NAMES = 6
_command_line: tuple[TorchDistributedConfig, Collection[str]] | None = None


@contextmanager
def command_line_config(config: TorchDistributedConfig, named: Collection[str] = ()) -> Iterator[None]:
    """Apply the command line's ``config`` to the runs that the program itself starts in the context.

    Args:
        named: fields that the command line sets explicitly, possibly to their defaults.
    """
    global _command_line  # the one command line of this process
    before, _command_line = _command_line, (config, named)
    try:
        yield
    finally:
        _command_line = before


def command_line_fields() -> dict[str, Any]:
    """Return the fields that the command line sets explicitly, or to another value than the default; without a name."""
    plain = TorchDistributedConfig()
    names = [each.name for each in fields(plain) if each.name != "name"]
    if _command_line is None:
        return {}
    config, named = _command_line
    return {n: getattr(config, n) for n in names if n in named or getattr(config, n) != getattr(plain, n)}
