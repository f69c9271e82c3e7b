"""``RunView``: the driver's view of an attempt in progress: joined tasks, their output, their failures and losses."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import socket
import time
from collections.abc import Sequence
from functools import partial

from lagom.driver.departure import Departure
from lagom.driver.rank_events import RankEvents
from lagom.driver.rank_places import RankPlaces
from lagom.driver.run_display import RunDisplay
from lagom.errors import LagomError, PlanError, RankError, StallError, Terminated
from lagom.extensions.registry import EXTENSIONS
from lagom.plan import Plan
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import FETCHED
from lagom.restart.losses import Loss, loss_in
from lagom.watch.run_dir import RunRecords
from lagom.watch.stall_texts import rank_names
from lagom.watch.stopped_processes import StoppedProcesses, kill_unless_needed
from lagom.wire.messages import (
    Closed,
    CutOff,
    Done,
    Failed,
    FileNote,
    Gather,
    JobOver,
    Join,
    LocalEvent,
    Lost,
    Message,
    RankReport,
    RanksStarted,
    Started,
    Stop,
    Stopping,
    TaskJoined,
    Warned,
)
from lagom.wire.peer_silence import LOST_S
from lagom.wire.rendezvous import LEAVE_S, WRITE_S, other_torch, peers
from lagom.wire.server import DriverServer
from lagom.wire.snapshot_messages import LEAVE_SNAPSHOT_S, SigtermHeard, SnapshotArrived, SnapshotKept

GATHER_S = 1.5
"""Seconds after the first join; if tasks are missing then, the others are told to exchange addresses without the
driver, by Spark's allGather."""
IMPATIENT_S = 5.0  # time without a message from the tasks, after which the user is told about the wait
_BUSY_S = 60.0  # in a local run, the user is told no earlier: its process always starts, if slowly
_GRACE_S = 5.0  # longest wait for the next message of a task after the job has ended
ANSWER_S = 3.0  # time in which a task must answer a stop; the driver waits only for tasks that do
_LOOK_S = 1.0  # interval of looks at the processes of a local run


class RunView:
    """Serves the channel of one attempt, and shows the attempt to the user from the calling thread.

    Args:
        where: place of the ranks, for the user.
        can_gather: whether tasks can exchange their addresses without the driver, as in a barrier job of Spark.
        payload_fd: file with the payload for hosts that fetch it.
        snapshot_fd: file with the snapshot that the attempt goes on from, for hosts that fetch it.
    """

    def __init__(
        self,
        plan: Plan,
        where: str,
        *,
        can_gather: bool,
        payload_fd: int | None = None,
        snapshot_fd: int | None = None,
        records: RunRecords | None = None,
        history: RunHistory | None = None,
    ) -> None:
        self.plan = plan
        lost_s = min(LOST_S, plan.config.timeout_s or LOST_S)
        self._history = history if history is not None else RunHistory()
        self.channel = DriverServer(
            self._take,
            self._close,
            payload_fd,
            self._hush,
            lost_s,
            snapshot_fd=snapshot_fd,
            snapshots=self._history.folder,
        )
        self.reports: dict[int, RankReport] = {}
        self._can_gather = can_gather
        self._num_tasks = 1 if plan.launcher == "local" else plan.num_slots
        self._joins: dict[int, Join] = {}
        self._places = RankPlaces(self._joins, lost_s)
        self._processes = StoppedProcesses()
        self._fork_server = -1
        self._gathering = False
        self._hears = True
        self._stopping = False
        self._impatient_at = time.monotonic() + (_BUSY_S if plan.launcher == "local" else 0.0)
        self._answer_by = 0.0
        self._answered: set[int] = set()
        self._connected: set[int] = set()
        self._done: set[int] = set()
        self._events = RankEvents()
        self._failures: list[RankReport] = []
        self._lost: list[LagomError] = []
        self._gone: Loss | None = None
        self._refused: PlanError | None = None
        self._ends_itself = False
        """Whether this process has ended the attempt by ``_depart``."""
        self._departure = Departure(
            self.channel, self._history, self._depart, lambda text: self._events.put(Warned(text=text))
        )
        self._records = records
        parts = (extension.view(plan, self.channel, self._events.put) for extension in EXTENSIONS)
        self._parts = [part for part in parts if part is not None]
        self._display = RunDisplay(
            plan, where, records, self._history, self._parts, self._put_later, self._departure.notice_snapshot
        )

    def __enter__(self) -> RunView:
        self.channel.__enter__()
        self._history.leave = self.leave
        return self

    def __exit__(self, *exc: object) -> None:
        self._history.leave = lambda: False
        self._departure.release()
        if exc[0] is not None:
            self.stop()
        self.channel.__exit__(*exc)
        self._history.loss = self.loss()
        self._display.close(self._end(exc[1]))

    def _end(self, error: object) -> str:
        """Return how the run ended, in a few words."""
        if isinstance(error, KeyboardInterrupt):
            return "ended by SIGTERM" if isinstance(error, Terminated) else "interrupted"
        if (loss := self.loss()) is not None:
            return loss.cause.partition(",")[0]
        if self._failures:
            first = self._failures[0]
            return f"failed on rank {first.rank}: {first.error}"
        return "failed" if error is not None or self.lost() is not None else "done"

    @property
    def stopped(self) -> bool:
        """Return whether the ranks have been told to end."""
        return self._stopping

    def adopt(self, connection: socket.socket) -> None:
        """Serve task 0, the only task of a local run, over ``connection``, one of an inherited pair of sockets."""
        self._connected.add(0)
        self.channel.adopt(connection, 0)

    def await_server(self, pid: int) -> None:
        """Notice if the fork server ``pid``, which is to start the host process of a local run, is stopped."""
        self._fork_server = pid
        self._processes.add(
            pid, "lagom's fork server on this machine", min(LOST_S, self.plan.config.timeout_s or LOST_S)
        )
        self.channel.call_later(_LOOK_S, self._look_for_stopped)

    @property
    def has_tasks(self) -> bool:
        """Return whether any task has connected, so that it can be told to stop."""
        return bool(self._connected)

    @property
    def begun(self) -> bool:
        """Return whether any task has joined."""
        return bool(self._joins)

    def stop(self) -> None:
        """Tell every task to end its ranks at once; later tasks are told when they join."""
        if not self._stopping:
            self._answer_by = time.monotonic() + ANSWER_S
        self._stopping = True
        self.channel.broadcast(Stop())
        for part in self._parts:
            part.close()

    def leave(self) -> bool:
        """Have rank 0 take a snapshot at the next batch, and then end the ranks; ``watch`` raises Terminated.

        Return True when the ranks are told to end. For any thread.
        """
        self._departure.leave(has_ranks=self.begun)
        if not self._has_returned():
            self.stop()
        return True

    def announce(self, loss: Loss) -> None:
        """End the attempt after a snapshot, since Spark has announced ``loss``; for any thread."""
        self.channel.call_later(0.0, partial(self._departure.announce, loss))

    def finish(self) -> None:
        """Note that the job is over, so that ``watch`` returns after the tasks' last messages; for any thread."""
        self._events.put(JobOver())
        for part in self._parts:
            part.close()

    def watch(self) -> None:
        """Show the ranks' messages until all tasks are done, or all that answered a stop in time, or the job is over.

        Raises:
            KeyboardInterrupt: on Ctrl-C; the end of the context then ends the run.
            Terminated: after ``leave``, unless all ranks have returned.
            LagomError: if the user ends the run from the debugger.
        """
        over = False
        while not self._abandoned():
            try:
                event = self._events.get(timeout=self._patience(over))
            except queue.Empty:
                if over:
                    return
                if self._hears and time.monotonic() >= self._impatient_at:
                    self._display.waiting(len(self._joins), self._num_tasks)
                continue
            self._display.show(event)
            over = over or isinstance(event, JobOver)
            if len(self._done) >= self._num_tasks or (over and self._connected <= self._done):
                break
        self._show_rest()
        if self._departure.is_terminated and not self._has_returned():
            raise Terminated

    def _has_returned(self) -> bool:
        """Return whether all ranks have returned."""
        reports = self.reports.values()
        return len(reports) == self.plan.world_size and all(report.ok for report in reports)

    def _patience(self, over: bool) -> float:
        if over:
            return _GRACE_S
        return min(IMPATIENT_S, max(0.1, self._answer_by - time.monotonic())) if self._stopping else IMPATIENT_S

    def _abandoned(self) -> bool:
        """Return whether ``ANSWER_S`` have passed since the stop, and every task that answered it is done."""
        if not self._stopping or time.monotonic() < self._answer_by:
            return False
        return not (self._connected & self._answered) - self._done

    def unheard(self) -> None:
        """Tell the user that the ranks cannot reach the driver: they send no messages before they end."""
        self._hears = False
        self._display.unheard()

    def say(self, message: Message) -> None:
        """Show output of rank 0, or record a timeline, that came with Spark's results since there was no link."""
        self._display.show(message)

    def failures(self) -> list[RankReport]:
        """Return the failures that tasks reported, in the order of arrival; of each rank only the first."""
        return self._failures

    def lost(self) -> LagomError | None:
        """Return the error of tasks that gave up, were lost, or do not fit together (a PlanError).

        Return None if there is none, or if the failure of a rank caused it.
        """
        if self._refused is not None:
            return self._refused
        if not self._lost or not all(failure.consequence for failure in self._failures):
            return None
        text = "; ".join(dict.fromkeys(map(str, self._lost)))
        first = self._lost[0]
        return type(first)(text, first.rank) if isinstance(first, RankError) else LagomError(text)

    def lose_executor(self) -> None:
        """Note that Spark has lost an executor, unless the attempt has a loss already, or was ended for more ranks."""
        if self._gone is None:
            self._gone = Loss(rank=None, host="", cause="Spark lost an executor")
            self._lost.append(LagomError(self._gone.cause))

    def _depart(self, loss: Loss) -> None:
        """End the attempt with ``loss``, unless it ends already; in the channel's thread.

        See Note [Departures] in driver/departure.py.
        """
        if not self._stopping and not self._done and not self._failures:
            self._gone, self._ends_itself = loss, True
            self._lost.append(LagomError(loss.cause))
            self.stop()

    def loss(self) -> Loss | None:
        """Return the loss that ended the attempt; None if it had another end, such as an error of the program.

        An end for more ranks counts as a loss with ``free_slots``, one that Spark has announced as ``is_planned``.
        """
        if self._refused is not None or len(self._lost) > (self._gone is not None):
            return None
        if all(failure.consequence for failure in self._failures):
            return self._gone
        hosts = {rank: join.host_name for join in self._joins.values() for rank in join.ranks}
        return loss_in(self._failures, hosts)

    def _show_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._display.show(self._events.get())

    def _take(self, task: int, message: Message) -> None:
        """Process a message of a task, in the channel's thread."""
        match message:
            case Join():
                self._connected.add(task)
                self._join(task, message)
            case Started():
                self._history.ranks_began()
                self._departure.ranks_began()
                self._events.put(RanksStarted(pids=message.pids))
            case Failed():
                self._fail(message.report)
                if message.report.rank == 0 or message.report.died:
                    self.stop()
                else:
                    self.channel.call_later(WRITE_S, self.stop)
            case CutOff():
                self._lose_way(message)
            case FileNote():
                self._history.wrote(dataclasses.asdict(message))
            case SnapshotKept():
                self._take_snapshot(message)
            case Stopping():
                self._answered.add(task)
            case SigtermHeard():
                self._hear(task, message)
            case Lost():
                if not self._ends_itself:
                    self._lost.append(LagomError(message.message))
                self.stop()
                self._end_task(task)
            case Done():
                self._take_reports(message.reports)
                self._end_task(task)
            case _ if not any(part.take(task, message) for part in self._parts):
                self._events.put(message)

    def _take_snapshot(self, kept: SnapshotKept) -> None:
        self._departure.expect(kept)
        if kept.description:
            self._history.note_kept(kept.number, kept.description)
        names = (f"{FETCHED}-{kept.number}{ending}" for ending in ("", ".json"))
        is_whole = not kept.sha256 or [self.channel.digests.pop(name, "") for name in names] == kept.sha256
        self._events.put(SnapshotArrived(kept=kept, is_whole=is_whole))

    def _hear(self, task: int, message: SigtermHeard) -> None:
        """End the attempt after a snapshot, as a rank or a host process has received SIGTERM."""
        join = self._joins[task]
        who = f"rank {message.rank}" if message.rank is not None else f"the process that holds {rank_names(join.ranks)}"
        rank = join.ranks[0] if message.rank is None else message.rank
        loss = Loss(rank=rank, host=join.host_name, cause=f"{who} received SIGTERM")
        self._departure.announce(loss, LEAVE_SNAPSHOT_S)

    def _take_reports(self, reports: Sequence[RankReport]) -> None:
        self.reports.update({report.rank: report for report in reports})
        failed = [report for report in reports if not report.ok]
        for report in failed:
            if report.has_failed:
                self._fail(report)
        if failed and all(report.exited for report in failed):
            self.channel.call_later(LEAVE_S, self.stop)  # ranks of other tasks are probably ending as well
        elif failed:
            self.stop()

    def _end_task(self, task: int) -> None:
        """Note that ``task`` is done; its reports are stored before, since ``watch`` may return at once."""
        self._done.add(task)
        self._events.put(Closed())  # wakes ``watch``

    def _lose_way(self, message: CutOff) -> None:
        """Note that two ranks do not reach each other, though both reach the driver: that is a loss."""
        if self._gone is None and not self._lost and all(failure.consequence for failure in self._failures):
            task = next(task for task, join in self._joins.items() if message.peer in join.ranks)
            error, cut_off = self._places.unreachable(message, task, self.channel.addresses)
            self._lost.append(error)
            self._gone = Loss(rank=message.peer, host=self._joins[task].host_name, cause=str(error), cut_off=cut_off)
            self.stop()

    def _fail(self, report: RankReport) -> None:
        if all(report.rank != earlier.rank for earlier in self._failures):
            # When lagom ends an attempt, its last ranks fail for lack of the others. The program may turn that into an
            # error of its own.
            consequence = report.consequence or self._ends_itself
            self._failures.append(dataclasses.replace(report, order=len(self._failures), consequence=consequence))

    def _close(self, task: int) -> None:
        """Note that the connection of ``task`` has closed; if nothing has ended the attempt yet, that is a loss."""
        if task in self._connected and task not in self._done:
            self._done.add(task)
            if not self._stopping and all(failure.consequence for failure in self._failures):
                error = self._places.gone(task)
                self._lost.append(error)
                join = self._joins.get(task)
                rank = error.rank if isinstance(error, RankError) else None
                host = join.host_name if join is not None else ""
                cut_off = self._places.lost_hosts(self.channel.addresses)
                self._gone = Loss(rank=rank, host=host, cause=str(error), cut_off=cut_off)
                self.stop()
        self._events.put(Closed())

    def _hush(self, task: int, seconds: float) -> None:
        """Warn if the machine of a task falls silent, or answers again; runs in the channel's thread.

        Args:
            seconds: the silence so far.
        """
        if task not in self._done and (text := self._places.update(task, seconds)) is not None:
            self._events.put(Warned(text=text))

    def _put_later(self, delay_s: float, event: LocalEvent) -> None:
        """Show ``event`` after ``delay_s``."""
        self.channel.call_later(delay_s, lambda: self._events.put(event))

    def _look_for_stopped(self) -> None:
        """Tell the user of stopped processes, and end the attempt after their limit; in the channel's thread.

        The stopped process is killed, since it cannot end its ranks.
        """
        if self._stopping or self._done:
            return
        for text in self._processes.look():
            self._events.put(Warned(text=text))
        if (overdue := self._processes.overdue()) is not None:
            pid, rank, text = overdue
            self._lost.append(StallError(text, rank))
            self.stop()
            kill_unless_needed(pid, rank)
        self.channel.call_later(_LOOK_S, self._look_for_stopped)

    def _join(self, task: int, message: Join) -> None:
        if self._fork_server >= 0:
            self._processes.forget(self._fork_server)
            what = f"the host process of {rank_names(message.ranks)}"
            self._processes.add(message.pid, what, self.plan.config.timeout_s, message.ranks[0])
        if self._stopping:
            self.channel.send(task, Stop())
            return
        if task in self._joins:
            twice = f"Spark started task {task} a second time; lagom begins a lost run again by itself, as a whole"
            self._lost.append(LagomError(twice))
            self.channel.send(task, Stop())
            return
        self._joins[task] = message
        if self._records is not None:
            self._records.joined(message, last=len(self._joins) == self._num_tasks)
        if self._gathering:
            self.channel.send(task, Gather())
        elif len(self._joins) == self._num_tasks:
            self._send_peers()
        elif len(self._joins) == 1 and self._can_gather:
            self.channel.call_later(GATHER_S, self._give_up_waiting)
        self._events.put(TaskJoined(host=message.host_name, ranks=message.ranks, cores=message.cores))

    def _send_peers(self) -> None:
        try:
            table = peers(list(self._joins.values()), self.plan.in_clear)
        except PlanError as error:
            self._refused = error
            self.stop()
            return
        self.channel.broadcast(table)
        if text := other_torch(list(self._joins.values())):
            self._events.put(Warned(text=text))

    def _give_up_waiting(self) -> None:
        if len(self._joins) < self._num_tasks and not self._stopping:
            self._gathering = True
            for task in self._joins:
                self.channel.send(task, Gather())
