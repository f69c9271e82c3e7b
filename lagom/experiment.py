"""``lagom(train, config)``: validate, plan, launch, aggregate, return."""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from lagom.aggregate import aggregate, remedy
from lagom.call import Call
from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import RUN_DIR as DEFAULT_RUN_DIR
from lagom.errors import LagomError, RankTraceback
from lagom.launchers import choose
from lagom.launchers.dataframes import write_frame
from lagom.launchers.failure import message_of, raise_failure
from lagom.plan import Plan, plan
from lagom.program.detect_distributed import is_distributed, needs_nccl
from lagom.program.signature import arguments, check_makers, unread_hparams
from lagom.random_states import random_states, set_random_states
from lagom.records.run_dir import RunRecords
from lagom.records.run_dir import records as new_records
from lagom.result import Result
from lagom.verify.rehearsals import verify
from lagom.verify.verification import say_not_rehearsed, show
from lagom.worker.process_settings import process_settings

log = logging.getLogger("lagom")


def lagom(train: Callable[..., Any], config: TorchDistributedConfig) -> Result:
    """Run ``train`` on every rank, as one machine would have run it, and return its value.

    Args:
        train: an ordinary training function of one process. It gets by keyword what its signature names:
            ``module``, ``hparams``, ``train_set``, ``test_set``, ``dataset``, ``reporter``, and any key of ``hparams``.
        config: the arguments for the function, and the number and place of ranks.

    Returns:
        The result: ``result["test result"]`` is the value, ``result.per_rank`` each rank's own value.

    Raises:
        ValueError: if the function asks for an argument that nothing provides; nothing has been started then.
        PlanError: if the run does not fit the cluster.
        PayloadError: if function, data or result cannot be pickled.
        VerificationError: with ``verify=True``, if the ranks would not compute what one process does.
        RankError: if a rank was killed or called ``sys.exit``.
        StallError: if a rank made no progress for ``timeout_s``.
        Exception: the function's own exception, with the rank's traceback as its cause.
    """
    started = time.monotonic()
    provided = _checked(train, config)
    launcher = choose(config.launcher)
    name = getattr(train, "__name__", "lagom")
    cluster = launcher.cluster()
    the_plan = plan(config, cluster, name, already_distributed=_is_distributed(train, provided, cluster))
    call = Call(
        function=train,
        provided=write_frame(provided),
        random_states=_random(config),
        settings=process_settings(),
    )
    if config.verify and the_plan.world_size > 1:
        if the_plan.already_distributed:
            say_not_rehearsed(name)
        else:
            show(verify(launcher, the_plan, call))
    with _run_records(config, the_plan, launcher.where(), source_of(train)) as records:
        outcomes = launcher.run(the_plan, call, records)
        raise_failure(outcomes)
        value, values = _values([outcome.load() for outcome in outcomes], the_plan)
        if records is not None:
            records.ended({"outcome": "returned", "value": value, "per_rank": values})
    return Result(
        value,
        values,
        seconds=time.monotonic() - started,
        name=the_plan.name,
        where=launcher.where(),
        run_dir=records.folder if records is not None else None,
        upload=records.upload if records is not None else None,
    )


def _checked(train: Callable[..., Any], config: TorchDistributedConfig) -> dict[str, Any]:
    """Check the call before anything starts; return what the config provides for the function."""
    if not isinstance(config, TorchDistributedConfig):
        raise ValueError(f"config is a {type(config).__name__}; want a TorchDistributedConfig")
    provided = _provided(config)
    arguments(train, provided | {"reporter": None})
    check_makers(provided)
    _check_folder()
    for line in unread_hparams(train, config.hparams):
        log.warning(line)
    return provided


def _values(returned: Sequence[Mapping[str, Any]], the_plan: Plan) -> tuple[Any, list[Any]]:
    """Return the value of the run and each rank's; take over rank 0's final random states."""
    values = [one["value"] for one in returned]
    advice = "" if the_plan.already_distributed else remedy(the_plan.config.batches, the_plan.config.evaluation)
    value = aggregate(values, [one["samples"] for one in returned], advice)
    if (states := returned[0].get("random")) is not None:
        set_random_states(states)
    return value, values


def _check_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise LagomError("the folder that this process stands in was removed; os.chdir() to another") from error


_command_line: tuple[TorchDistributedConfig, Collection[str]] | None = None


@contextmanager
def command_line_config(config: TorchDistributedConfig, named: Collection[str] = ()) -> Iterator[None]:
    """Apply the command line's ``config`` to the runs that a program starts in the context by itself.

    Args:
        named: fields that the command line has named, whatever their values.
    """
    global _command_line  # the one command line of this process
    before, _command_line = _command_line, (config, named)
    try:
        yield
    finally:
        _command_line = before


def command_line_fields() -> dict[str, Any]:
    """Return the fields that the command line has named, or set to another value than the default."""
    plain = TorchDistributedConfig()
    names = [each.name for each in fields(plain) if each.name != "name"]
    if _command_line is None:
        return {}
    config, named = _command_line
    return {n: getattr(config, n) for n in names if n in named or getattr(config, n) != getattr(plain, n)}


@contextmanager
def _run_records(
    config: TorchDistributedConfig, the_plan: Plan, where: str, source: str | None
) -> Iterator[RunRecords | None]:
    """Open the run's records, if they are wanted; record an error that the context raises."""
    settings = {each.name: getattr(config, each.name) for each in fields(config)}
    facts = {
        "name": the_plan.name,
        "description": config.description,
        "where": where,
        "config": settings,
        "source": source,
    }
    facts |= {name: getattr(the_plan, name) for name in ("world_size", "gpu", "ranks_per_slot")}
    facts |= {name: getattr(config, name) for name in ("seed", "zero_lvl")}
    records = new_records(config.run_dir, config.run_dir == DEFAULT_RUN_DIR, facts)
    try:
        yield records
    except BaseException as error:
        if records is not None:
            cause = error.__cause__ if isinstance(error.__cause__, RankTraceback) else None
            told = {"error": type(error).__name__, "message": message_of(error)}
            records.ended({"outcome": "raised", **told, "rank": cause.rank if cause else None, "traceback": str(cause)})
        raise
    finally:
        if records is not None:
            if the_plan.config.timeline:
                records.merge_timelines(None if isinstance(config.timeline, bool) else config.timeline)
            records.close()


def source_of(train: Callable[..., Any]) -> str | None:
    """Return the file that defines ``train``, or None if there is none, as in a notebook."""
    path = getattr(train, "path", None) or getattr(
        getattr(inspect.unwrap(train), "__code__", None), "co_filename", None
    )
    return os.path.abspath(path) if isinstance(path, (str, os.PathLike)) and os.path.isfile(path) else None


def _provided(config: TorchDistributedConfig) -> dict[str, Any]:
    """Return the fields of ``config`` that a function can ask for, in both spellings of the data sets."""
    sets = {"train_set": config.train_set, "test_set": config.test_set}
    provided: dict[str, Any] = {"hparams": config.hparams}
    if config.module is not None:
        provided["module"] = config.module
    if config.dataset is not None:
        sets = dict(zip(sets, config.dataset, strict=True))
    provided |= {name: data for name, data in sets.items() if data is not None}
    if provided.keys() >= sets.keys():
        provided["dataset"] = list(sets.values())
    return provided


def _is_distributed(train: Callable[..., Any], provided: dict[str, Any], cluster: Cluster) -> bool:
    """Return whether the program, or an argument from the config, is written for torchrun, and can run so here."""
    given = [provided.get(name) for name in ("module", "train_set", "test_set")] + list(provided["hparams"].values())
    given += [part for value in given if isinstance(value, (list, tuple)) for part in value[:16]]
    used = [train, *(value for value in given if callable(value))]
    if not is_distributed(*used):
        return False
    said = [*sys.argv, *(value for value in given if isinstance(value, str))]
    if cluster.gpus_per_slot or any("gloo" in word for word in said) or not needs_nccl(*used):
        return True
    log.warning(_NO_NCCL)
    return False


_NO_NCCL = (
    "the program has a process group of its own by NCCL alone, which needs GPUs, and there are none: RANK and "
    "WORLD_SIZE are not set, and where it runs in one process without them lagom distributes it; or "
    "name the backend 'gloo'"
)


def _random(config: TorchDistributedConfig) -> dict[str, Any] | None:
    """Return the states of this process's generators if ranks are to start from them."""
    return random_states() | {"entropy": secrets.randbits(32)} if config.seed is None else None
