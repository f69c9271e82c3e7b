"""Check a call before anything starts, and collect what every run of it needs: arguments, random states, records."""

from __future__ import annotations

import inspect
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.config.torch_distributed import RUN_DIR as DEFAULT_RUN_DIR
from lagom.driver.failure import message_of
from lagom.errors import LagomError, RankTraceback
from lagom.extensions.registry import EXTENSIONS, wanted
from lagom.plan import Plan
from lagom.program.detect_distributed import is_distributed, names_device, needs_nccl
from lagom.program.failure_advice import imported_packages
from lagom.program.signature import arguments, check_makers, unread_hparams
from lagom.program.unreadable_data import check_data
from lagom.random_states import random_states
from lagom.run_folder import RunFolder
from lagom.watch.run_dir import RunRecords
from lagom.watch.run_dir import records as new_records
from lagom.watch.upload import Upload

log = logging.getLogger("lagom")


def checked(
    train: Callable[..., Any], config: TorchDistributedConfig, searched: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Check the call before anything starts; return the arguments that the config provides for the function.

    Args:
        searched: examples of the hyperparameters for which each trial has values of its own.

    Raises:
        ValueError: if the config is of another class, or does not fit the function.
        LagomError: if the working directory was removed.
    """
    if not isinstance(config, TorchDistributedConfig):
        raise ValueError(f"config is a {type(config).__name__}; want a TorchDistributedConfig")
    provided = provided_arguments(config)
    hparams = {**config.hparams, **(searched or {})}
    arguments(train, provided | {"reporter": None, "hparams": hparams})
    check_makers(provided)
    check_data(train, provided)
    _check_folder()
    for extension in EXTENSIONS:
        extension.check_call(config)
    for line in unread_hparams(train, hparams):
        log.warning(line)
    return provided


def _check_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise LagomError("the folder that this process stands in was removed; os.chdir() to another") from error


@contextmanager
def run_records(
    config: TorchDistributedConfig,
    the_plan: Plan,
    where: str,
    source: str | None,
    folder: RunFolder | None = None,
    upload: Upload | None = None,
    *,
    began: float,
) -> Iterator[RunRecords | None]:
    """Open new records of the run, or the records in ``folder``; record an error that the context raises.

    Yield None if the config keeps no records, or if the default folder cannot be written to.

    Args:
        began: monotonic time of the call, from which the records count seconds.
        folder: records of an earlier process of the same run, with their ``upload``, if they are kept at a URL.

    Raises:
        PlanError: if the config names a folder or URL that cannot be written to.
    """
    settings = {each.name: getattr(config, each.name) for each in fields(config)}
    facts: dict[str, Any] = {
        "seed": config.seed,
        "name": the_plan.name,
        "description": config.description,
        "where": where,
        "config": settings,
        "source": source,
    }
    facts |= {name: getattr(the_plan, name) for name in ("world_size", "gpu", "ranks_per_slot")}
    if folder is not None:
        records: RunRecords | None = RunRecords(folder, facts, upload, began=began)
    else:
        records = new_records(config.run_dir, config.run_dir == DEFAULT_RUN_DIR, facts, began)
    try:
        yield records
    except BaseException as error:
        if records is not None:
            cause = error.__cause__ if isinstance(error.__cause__, RankTraceback) else None
            told = {"error": type(error).__name__, "message": message_of(error)}
            of_rank = {"rank": cause.rank, "traceback": str(cause)} if cause else {"rank": None, "traceback": None}
            records.ended({"outcome": "raised", **told, **of_rank})
        raise
    finally:
        if records is not None:
            for extension in wanted(the_plan):
                extension.complete_records(the_plan, records)
            records.close()


def source_of(train: Callable[..., Any]) -> str | None:
    """Return the file that defines ``train``, or None if there is none, as in a notebook."""
    path = getattr(train, "path", None) or getattr(
        getattr(inspect.unwrap(train), "__code__", None), "co_filename", None
    )
    return os.path.abspath(path) if isinstance(path, (str, os.PathLike)) and os.path.isfile(path) else None


def provided_arguments(config: TorchDistributedConfig) -> dict[str, Any]:
    """Return the fields of ``config`` that a function can ask for and that are set.

    Data sets are under their names, and as ``dataset`` if both are set.
    """
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


def facts_of_code(train: Callable[..., Any], provided: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    """Return the facts for ``plan`` that the code of the program and of its arguments shows.

    A program that is written for torchrun and knows only NCCL needs GPUs: without them it counts as an ordinary one,
    and a warning says so.
    """
    given = [provided.get(name) for name in ("module", "train_set", "test_set")] + list(provided["hparams"].values())
    given += [part for value in given if isinstance(value, (list, tuple)) for part in value[:16]]
    used = [train, *(value for value in given if callable(value))]
    said = [*sys.argv, *(value for value in given if isinstance(value, str))]
    distributed = is_distributed(*used)
    if distributed and not cluster.gpus_per_slot and not any("gloo" in word for word in said) and needs_nccl(*used):
        log.warning(_NO_NCCL)
        distributed = False
    kind = cluster.device_kind
    places = not cluster.gpus_per_slot or any(word.startswith(kind) for word in said) or names_device(kind, *used)
    return {"already_distributed": distributed, "names_gpu": places, "packages": imported_packages(*used)}


_NO_NCCL = (
    "the program has a process group of its own by NCCL alone, which needs GPUs, and there are none: RANK and "
    "WORLD_SIZE are not set, and where it runs in one process without them lagom distributes it; or "
    "name the backend 'gloo'"
)


def random_start(config: TorchDistributedConfig) -> dict[str, Any] | None:
    """Return the states of this process's generators, from which ranks start; None if the config has a seed."""
    return random_states() | {"entropy": secrets.randbits(32)} if config.seed is None else None
