"""``decommissions_announced``: tells a run when Spark decommissions an executor that holds ranks of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from lagom.plan import Plan
from lagom.restart.losses import Loss
from lagom.spark.spark_session import SparkFacts
from lagom.watch.stall_texts import rank_names

log = logging.getLogger("lagom")
LOOK_S = 1.0
"""Seconds between two looks, of which each takes the driver a call to its JVM for each executor: a millisecond."""


@contextmanager
def decommissions_announced(
    facts: SparkFacts, group: str, plan: Plan, announce: Callable[[Loss], None]
) -> Iterator[None]:
    """Context manager that calls ``announce`` in another thread, once for each executor of the job ``group``.

    Spark has no such news for Connect, and a local master has one executor, so nothing happens there.
    """
    if not facts.hears_decommissions:
        yield
        return
    watch, over = _Watch(facts, group, plan), threading.Event()

    def look() -> None:
        try:
            while not over.wait(LOOK_S):
                for loss in watch.look():
                    announce(loss)
        except Exception as error:  # another version of Spark, or its JVM is gone, which the job shows as well
            log.info("it is not known which executors Spark decommissions: %s", str(error).partition("\n")[0])

    thread = facts.thread_class()(target=look, name="lagom-decommissions", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(LOOK_S)


class _Watch:
    """Executors that run the tasks of a job, and those of them that Spark decommissions."""

    def __init__(self, facts: SparkFacts, group: str, plan: Plan) -> None:
        self._facts, self._group, self._plan = facts, group, plan
        self._tasks: Mapping[int, tuple[str, str]] = {}
        """Executor and host of each task."""
        self._known = set[str]()
        """Executors that have been announced."""

    def look(self) -> Iterator[Loss]:
        """Yield the loss of each executor with tasks of the job that Spark decommissions since the last look."""
        if len(self._tasks) < self._plan.num_slots:
            tasks = self._facts.tasks_of(self._group, self._plan.num_slots)
            self._tasks = {number: (executor, host) for number, executor, host in tasks}
        for executor, host in dict.fromkeys(self._tasks.values()):
            if executor not in self._known and self._facts.is_decommissioned(executor):
                self._known.add(executor)
                yield self._loss(executor, host)

    def _loss(self, executor: str, host: str) -> Loss:
        each, size = self._plan.ranks_per_slot, self._plan.world_size
        numbers = sorted(number for number, (its_executor, _) in self._tasks.items() if its_executor == executor)
        ranks = [rank for number in numbers for rank in range(number * each, min((number + 1) * each, size))]
        cause = f"Spark decommissions executor {executor} on {host}, which holds {rank_names(ranks)}"
        return Loss(rank=ranks[0], host=host, cause=cause, is_planned=True)
