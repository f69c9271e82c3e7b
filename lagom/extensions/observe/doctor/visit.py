"""``visit``: runs ``lagom doctor``: starts a run whose ranks only examine their hosts, and judges the facts."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lagom
from lagom.config import TorchDistributedConfig
from lagom.driver.failure import raise_failure
from lagom.errors import CollectiveError, LagomError
from lagom.extensions.observe.doctor.examination import examine
from lagom.extensions.observe.doctor.executors import APART, executor_findings
from lagom.extensions.observe.doctor.findings import Finding, findings
from lagom.launch import choose
from lagom.plan import plan
from lagom.program.signature import Call
from lagom.spark.spark_master import check_packages

_MARKS = {"pass": "pass", "warn": "WARN", "fail": "FAIL"}


def visit(config: TorchDistributedConfig) -> list[Finding]:
    """Start a run with ``config`` whose ranks examine their hosts, and return the findings.

    On Spark, a survey of the executors comes first; if the survey fails, there is no run. Errors of the survey and the
    run become findings too; none are raised.
    """
    found = [check_this_process(config.launcher)]
    try:
        launcher = choose(config.launcher)
        the_plan = plan(config, launcher.cluster(), "doctor")
        where = f"{launcher.where()}, {the_plan.world_size} ranks"
    except Exception as error:
        return [*found, Finding("fail", "cluster", f"{type(error).__name__}: {error}", "see the message")]
    found.append(Finding("pass", "cluster", where))
    try:
        with _listening(launcher) as address:
            provided = {"hparams": {"address": address}}
            if hasattr(launcher, "survey"):
                found += executor_findings(launcher.survey(the_plan, address))
                if any(one.level == "fail" for one in found):
                    return found  # a run would fail later, for the same reason
            start = time.monotonic()
            outcomes = launcher.run(the_plan, Call(function=examine, provided=provided))
            seconds = time.monotonic() - start
            raise_failure(outcomes)
    except CollectiveError as error:
        return [*found, Finding("fail", "launch", str(error), APART)]
    except Exception as error:
        return [*found, Finding("fail", "launch", f"{type(error).__name__}: {error}", "see the message")]
    found += findings([outcome.load()["value"] for outcome in outcomes], seconds)
    if address is None and the_plan.launcher == "spark":
        remedy = "runs work, and show nothing until they end"
        found.append(Finding("warn", "driver", "this session knows no address of it (Spark Connect)", remedy))
    return found


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
    found = ", ".join(parts) + ("" if shutil.which("java") else ", no Java")
    if launcher == "local" and "pyspark" in parts:
        try:
            check_packages()
        except LagomError as error:
            return Finding("warn", "this process", f"{found}; no Spark", str(error))
    if missing:
        return Finding("warn", "this process", f"{found}; no torch", "only launcher='spark' works without")
    return Finding("pass", "this process", found)


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
