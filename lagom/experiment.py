"""``lagom(train, config)``: validate, plan, launch, aggregate, return; ``resume`` continues a run from snapshots."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import Launcher
from lagom.config.trials import TrialsConfig
from lagom.driver.driver_run import DriverRun
from lagom.driver.preparation import checked, facts_of_code, random_start, run_records, source_of
from lagom.driver.termination import softly_terminated
from lagom.errors import LagomError
from lagom.extensions.registry import EXTENSIONS, replaced_arguments
from lagom.launch import choose
from lagom.on_rank.process_settings import process_settings
from lagom.plan import plan
from lagom.program.signature import Call, function_name
from lagom.program.sources import source_files
from lagom.result import Result
from lagom.timings import Timings

if TYPE_CHECKING:
    from lagom.config import AblationConfig, HyperparameterOptConfig
    from lagom.extensions.search.ablation_result import AblationResult
    from lagom.extensions.search.search_result import SearchResult


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
    for extension in EXTENSIONS:
        if (runs := extension.runs_config(config)) is not None:
            result: Result | SearchResult = runs(train, config)
            return result
    if isinstance(config, TrialsConfig):
        raise LagomError(f"this installation of lagom has no extension that runs trials of {type(config).__name__}")
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
        if any(extension.needs_sources(config) for extension in EXTENSIONS)
        else {},
    )
    source = source_of(train)
    run = DriverRun(launcher=launcher, plan=the_plan, call=call, timings=timings, source=source)
    run.check()
    with (
        softly_terminated(the_plan) as run.termination,
        run_records(config, the_plan, launcher.where(), source, began=timings.began) as records,
    ):
        try:
            return run.run(records)
        except (Exception, KeyboardInterrupt) as error:
            run.cut_frames(error)
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
    for extension in EXTENSIONS:
        if (resumes := extension.resumes_run()) is not None:
            return resumes(run_dir, world_size, launcher)
    raise LagomError("this installation of lagom has no extension that resumes runs")


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
