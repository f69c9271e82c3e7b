"""``survey``: runs a Spark job that collects facts about its tasks, such as Python versions and addresses."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from lagom.errors import LagomError
from lagom.plan import Plan
from lagom.program.sources import lagom_zip
from lagom.spark import spark_task as task_module
from lagom.spark.spark import changed_environment, plain_interrupt, task_by_value
from lagom.spark.spark_failure import why_it_failed
from lagom.spark.spark_job import SparkJob
from lagom.spark.spark_session import SparkFacts


def survey(facts: SparkFacts, plan: Plan, driver: tuple[str, int] | None) -> Sequence[Mapping[str, Any]]:
    """Run a Spark job with the tasks of ``plan``; return the facts of each task, in the order of the tasks.

    See ``lagom.spark.executor_survey`` for the facts.

    Args:
        driver: the address at which the tasks try to reach the driver; None if it has no address.

    Raises:
        LagomError: if the job fails, with Spark's text, or with the remedy if the cause is known.
    """
    group = f"lagom-survey-{secrets.token_hex(4)}"
    packages = {package.name: package.distribution for package in plan.packages}
    function = task_by_value(
        task_module.spark_survey(lagom_zip(), driver, plan.barrier, changed_environment(), packages)
    )

    def job() -> Sequence[Any]:
        facts.tag(group, f"lagom: a survey of {plan.num_slots} tasks")
        return facts.map_tasks(function, task_module.SURVEY_SCHEMA, plan)

    with plain_interrupt():
        running = SparkJob(job, facts.thread_class())
        try:
            running.start()
            rows = running.result()
        except KeyboardInterrupt:
            facts.cancel(group)
            raise
        except Exception as error:
            raise LagomError(_short(why_it_failed(error))) from error
    return sorted((json.loads(row["facts"]) for row in rows), key=lambda one: int(one["task"]))


def _short(text: str) -> str:
    """Return the task's error in Spark's ``text``, without the stages and tasks around it; else the whole text."""
    found = re.search(r"(\[[A-Z_.]+\] .*|\w*(?:Error|Exception): .*)", text)
    return found[1] if found else text
