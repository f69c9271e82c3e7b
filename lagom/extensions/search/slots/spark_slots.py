"""``SparkSlots``: the slots of a search as the tasks of one long Spark job."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lagom.errors import LagomError, PlanError
from lagom.extensions.search.on_rank.messages import SearchOver, SlotJoin
from lagom.extensions.search.slots.trial_slots import SlotChannel, SlotEvent
from lagom.plan import Plan
from lagom.program.signature import Call
from lagom.program.sources import modules_zip
from lagom.spark import spark_task as task_module
from lagom.spark.spark import SparkPayload, encryption, plain_interrupt, task_of
from lagom.spark.spark_failure import full_text, own_message, why_it_failed
from lagom.spark.spark_job import SparkJob
from lagom.spark.spark_session import SparkFacts
from lagom.wire.messages import Closed, JobOver, LocalEvent, Message, Stop

_CALM_S = 10.0  # time for tasks to end after the search: Spark would end its Python workers with a cancelled job
_END_S = 1.5  # time for tasks to end on Ctrl-C or an error, or if some tasks have not begun
_CANCEL_S = 10.0  # time for Spark to end a cancelled job
_AGAIN_S = 0.3  # between two attempts to cancel: Spark ignores an attempt that comes before the job


class SparkSlots(SlotChannel):
    """Tasks without a barrier: each begins when Spark has room for it, and Spark starts a lost task again.

    A trial takes ``plan.num_slots`` tasks of one host: one for each rank, or fewer if tasks have several GPUs. The
    first task to join runs the trial; the others only occupy their slots.
    """

    def __init__(self, facts: SparkFacts, plan: Plan, call: Call, num_slots: int) -> None:
        self._stack = contextlib.ExitStack()
        self._facts = facts
        self._plan = dataclasses.replace(plan, barrier=False)
        self._call = call
        self._num_tasks = num_slots * plan.num_slots
        self._payload = self._stack.enter_context(SparkPayload(call))
        super().__init__(self._payload.fd)
        self._joined: dict[int, SlotJoin] = {}
        self._begun: set[int] = set()
        self._leaders: dict[int, list[int]] = {}
        """All tasks of each slot, by its first task."""
        self._released: set[int] = set()
        """Tasks that are told to end, as no trial is left for them."""
        self._group = f"lagom-{secrets.token_hex(8)}"
        self._job: SparkJob | None = None

    def begin(self) -> None:
        """Start the job.

        Raises:
            LagomError: if executors cannot reach this process, or encryption is on and no certificate can be made.
        """
        self._stack.enter_context(self.channel)
        address = self._address()
        modules = b"" if self._facts.one_machine else modules_zip(self._call.function)
        spec = self._payload.spec(self._plan, address, self.channel.secret, modules, self._facts)
        spec = dataclasses.replace(spec, certificate=self._certificate)
        function = task_of(spec, self._payload.broadcast(self._facts, spec))
        ranks = self._num_tasks * self._plan.ranks_per_slot
        tasks = dataclasses.replace(self._plan, world_size=ranks)

        def job() -> Sequence[Any]:
            self._facts.tag(self._group, f"lagom: search of {self._plan.name}")
            return self._facts.map_tasks(function, task_module.SCHEMA, tasks)

        self._stack.enter_context(plain_interrupt())
        over = SlotEvent(-1, JobOver())
        self._job = SparkJob(job, self._facts.thread_class(), lambda: self.events.put(over))
        self._job.start()

    def __exit__(self, *exc: object) -> None:
        """End the slots, and the trials that still run on them."""
        self.over(_END_S if any(exc) or len(self._begun) < self._num_tasks else _CALM_S)
        self._stack.close()

    def release(self, slot: int) -> bool:
        """End the tasks of ``slot`` if Spark can then remove their executors, and those that wait to form a slot.

        See Note [Executors of a search].
        """
        if not self._facts.dynamic:
            return False
        del self._leaders[slot]
        of_others = {task for tasks in self._leaders.values() for task in tasks}
        for task in self._joined.keys() - of_others - self._released:
            self._released.add(task)
            self.channel.send(task, SearchOver())
        return True

    def serve(self, take: Callable[[int, Message | LocalEvent], None], timeout_s: float) -> None:
        """See ``TrialSlots.serve``."""
        event = self._next(timeout_s)
        if event is None:
            return
        slot, message = event
        if isinstance(message, JobOver):
            assert self._job is not None
            try:
                self._job.result()
            except Exception as error:
                own = own_message(full_text(error))
                raise LagomError(own or f"Spark's job failed: {why_it_failed(error)}") from error
            raise LagomError("Spark's job ended before the search did")
        if isinstance(message, SlotJoin):
            self._joined[slot] = message
            self._begun.add(slot)
            if (whole := self._gather(message.host)) is not None:
                take(*whole)
            return
        if isinstance(message, Closed):
            self._joined.pop(slot, None)
            if self._leaders.pop(slot, None) is None:
                return
        take(slot, message)

    def over(self, patience_s: float = _END_S) -> None:
        """Tell all slots that the search is over; cancel the job if it has not ended after ``patience_s`` seconds."""
        self.channel.broadcast(Stop())
        self.channel.broadcast(SearchOver())
        if self._job is None:
            return
        deadline = time.monotonic() + patience_s
        while self._job.lasts and self._joined and (left_s := deadline - time.monotonic()) > 0:
            event = self._next(left_s)
            if event is not None and isinstance(event.message, Closed):
                self._joined.pop(event.slot, None)
        if self._job.lasts and not self._joined:
            self._job.wait(deadline - time.monotonic() if patience_s > _END_S else _AGAIN_S)
        deadline = time.monotonic() + _CANCEL_S
        while self._job.lasts and time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                self._facts.cancel(self._group)
            self._job.wait(_AGAIN_S)

    def _address(self) -> tuple[str, int]:
        tls, self._certificate = encryption(self._facts) if self._plan.encrypted else (None, "")
        if self._facts.bind is not None:
            with contextlib.suppress(OSError):
                bound = self.channel.listen(self._facts.bind, self._num_tasks, tls)
                return (self._facts.advertise or bound[0], bound[1])
        raise LagomError(
            "a search needs executors that can reach this process, and this session says that they cannot: "
            "set spark.driver.host to an address of this machine, or use launcher='local'"
        )

    def _gather(self, host: str) -> SlotEvent | None:
        """Combine waiting tasks of ``host`` into a slot; return its join message, or None if there are too few.

        Raises:
            PlanError: if all tasks have joined, and no host has enough of them for a trial.
        """
        taken = {task for tasks in self._leaders.values() for task in tasks} | self._released
        spare = [task for task, join in self._joined.items() if join.host == host and task not in taken]
        width = self._plan.num_slots
        if len(spare) >= width:
            leader, tasks = spare[0], spare[:width]
            self._leaders[leader] = tasks
            gpus = [gpu for task in tasks for gpu in self._joined[task].gpus]
            return SlotEvent(leader, dataclasses.replace(self._joined[leader], gpus=gpus[: self._plan.world_size]))
        if len(self._joined) == self._num_tasks and not self._leaders and not self._released:
            most = max(Counter(join.host for join in self._joined.values()).values())
            raise PlanError(
                f"a trial has {self._plan.world_size} ranks and needs {width} task slots of one host, and no host has "
                f"more than {most}; set ranks_per_trial={most * self._plan.ranks_per_slot}"
            )
        return None


# Note [Executors of a search]
#
# With dynamic allocation, Spark itself requests executors for tasks that wait, and removes those that run none for
# spark.dynamicAllocation.executorIdleTimeout (60 s). Its allocation manager sets the number of executors anew several
# times a second, so requests by SparkContext.requestTotalExecutors would be undone. So a search shows Spark what it
# needs by its tasks: one for each slot, as many slots as trials, up to spark.dynamicAllocation.maxExecutors. A slot
# keeps its task, and so its executor, from trial to trial. When no trial is left for an idle slot, its task ends
# (`release`), and Spark can give the executor to another application while the last trials still run. Tasks that still
# wait then run on the released slots, and end at once. If the slot of a running trial is lost after that, Spark starts
# its task again. Without dynamic allocation executors stay with the application, and slots are kept for lost trials.
