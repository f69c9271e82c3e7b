"""``visit``: runs ``lagom doctor``: starts a run whose ranks only examine their hosts, and judges the facts."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import lagom
from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.driver.failure import raise_failure
from lagom.driver.preparation import packages_of, provided_arguments
from lagom.errors import CollectiveError, LagomError
from lagom.extensions.observe.doctor.examination import examine
from lagom.extensions.observe.doctor.executors import APART, executor_findings
from lagom.extensions.observe.doctor.findings import Finding, findings
from lagom.launch import choose
from lagom.plan import Package, plan
from lagom.program.signature import Call
from lagom.program.sources import is_foreign
from lagom.spark.spark_master import check_packages

_MARKS = {"pass": "pass", "warn": "WARN", "fail": "FAIL"}


def visit(config: TorchDistributedConfig, train: Callable[..., Any] | None = None) -> list[Finding]:
    """Start a run with ``config`` whose ranks examine their hosts, and return the findings.

    Also compare the packages that ``train`` and the config's arguments import, or without ``train`` those that the
    program's main module and its functions use, with those of Spark's executors.

    On Spark, a survey of the executors comes first; if the survey fails, there is no run. Errors of the survey and the
    run become findings too; none are raised.
    """
    results = [check_this_process(config.launcher)]
    try:
        launcher = choose(config.launcher)
        cluster = launcher.cluster()
        the_plan = plan(config, cluster, "doctor", packages=_packages(config, train, cluster))
        where = f"{launcher.where()}, {the_plan.world_size} ranks"
    except Exception as error:
        return [*results, Finding("fail", "cluster", f"{type(error).__name__}: {error}", "see the message")]
    results.append(Finding("pass", "cluster", where))
    try:
        with _listening(launcher) as address:
            provided = {"hparams": {"address": address}}
            if hasattr(launcher, "survey"):
                results += executor_findings(launcher.survey(the_plan, address), the_plan.packages)
                if any(one.level == "fail" for one in results):
                    return results  # a run would fail later, for the same reason
            start = time.monotonic()
            # What the program needs is found already, and the ranks do not run it.
            outcomes = launcher.run(replace(the_plan, packages=()), Call(function=examine, provided=provided))
            seconds = time.monotonic() - start
            raise_failure(outcomes)
    except CollectiveError as error:
        return [*results, Finding("fail", "launch", str(error), APART)]
    except Exception as error:
        return [*results, Finding("fail", "launch", f"{type(error).__name__}: {error}", "see the message")]
    results += findings([outcome.load()["value"] for outcome in outcomes], seconds)
    if address is None and the_plan.launcher == "spark":
        remedy = "runs work, and show nothing until they end"
        results.append(Finding("warn", "driver", "this session knows no address of it (Spark Connect)", remedy))
    return results


def _packages(
    config: TorchDistributedConfig, train: Callable[..., Any] | None, cluster: Cluster
) -> tuple[Package, ...]:
    """Return the packages of the program; without ``train``, those of the main module, none of which is needed."""
    provided = provided_arguments(config)
    if train is not None:
        return packages_of([train], provided, cluster)
    used = [each for each in vars(sys.modules["__main__"]).values() if isinstance(each, (ModuleType, FunctionType))]
    own = [each for each in used if isinstance(each, ModuleType) or not is_foreign(each)]
    found = packages_of(own, provided, cluster)
    return tuple(replace(package, is_needed=False) for package in found)


def print_findings(found: Sequence[Finding]) -> str:
    """Return the report as text: one line for each finding, and its remedy on a line below."""
    width = max(len(one.what) for one in found)
    lines = []
    for one in found:
        lines.append(f"{_MARKS[one.level]}  {one.what:{width}}  {one.found}")
        if one.remedy:
            lines.append(f"      {'':{width}}  -> {one.remedy}")
    return "\n".join(lines)


def as_json(found: Sequence[Finding]) -> str:
    """Return the report as JSON: a list of objects with level, what, found and remedy."""
    return json.dumps([one.as_json() for one in found], indent=2)


def check_this_process(launcher: str) -> Finding:
    """Return a finding about this process: versions, packages and Java."""
    parts = [f"lagom {lagom.__version__}", f"Python {platform.python_version()}"]
    parts += [name for name in ("torch", "pyspark", "pyarrow") if importlib.util.find_spec(name) is not None]
    missing = [] if importlib.util.find_spec("torch") is not None else ["torch"]
    versions = ", ".join(parts) + ("" if shutil.which("java") else ", no Java")
    if launcher == "local" and "pyspark" in parts:
        try:
            check_packages()
        except LagomError as error:
            return Finding("warn", "this process", f"{versions}; no Spark", str(error))
    if missing:
        return Finding("warn", "this process", f"{versions}; no torch", "only launcher='spark' works without")
    return Finding("pass", "this process", versions)


@contextmanager
def _listening(launcher: Any) -> Iterator[tuple[str, int] | None]:
    """Listen at an address that executors should reach, and yield the address.

    Yield None if the launcher is not Spark, or if Spark's session has no address of this machine.
    """
    facts = getattr(launcher, "facts", None)
    if facts is None or facts.bind is None:
        yield None
        return
    # Nobody calls ``accept``: the kernel completes connections up to the backlog, for which it has its own limit.
    with socket.create_server((facts.bind, 0), backlog=1 << 15) as server:
        bound = server.getsockname()
        yield (facts.advertise or bound[0], bound[1])
