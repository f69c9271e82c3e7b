"""``run_attempts``: runs a call, and runs it again after the loss of a rank, an executor or a host.

Note [Files of a lost attempt] in restart/written_files.py says which files a new attempt finds.
"""

from __future__ import annotations

import dataclasses
import sys

from lagom.driver.failure import message_of, raise_failure
from lagom.driver.protocol import Launcher, Outcome
from lagom.driver.termination import Termination
from lagom.errors import LagomError, SnapshotError, Terminated
from lagom.plan import Plan
from lagom.program.signature import Call
from lagom.restart.history import Failure, RunHistory
from lagom.restart.kept_snapshots import SnapshotFolder
from lagom.restart.losses import Loss, loss_in
from lagom.restart.written_files import put_back, remove_siblings
from lagom.timings import Timings
from lagom.watch.run_dir import RunRecords

REPLACED_S = 4.0  # longest wait for the replacement of a lost executor, before a run restarts without it
LAST_S = 90.0  # the same wait if the run cannot restart without it


def run_attempts(
    launcher: Launcher,
    plan: Plan,
    call: Call,
    records: RunRecords | None = None,
    snapshots: SnapshotFolder | None = None,
    timings: Timings | None = None,
    termination: Termination | None = None,
) -> tuple[list[Outcome], list[Failure]]:
    """Run ``call`` under ``plan``, again after up to ``max_failures`` losses; return the last outcomes and all losses.

    Args:
        snapshots: folder of the run's snapshots; the first attempt continues from the newest, if there is one.
        timings: counts the time of lost attempts, and the last attempt's time until its ranks began.
        termination: tells of SIGTERM, which ends the run after a last snapshot.

    Raises:
        Terminated: after SIGTERM, unless the run had returned before.
        Exception: as ``raise_failure`` and ``Launcher.run``; after a loss only if attempts or slots do not suffice.
    """
    termination = termination or Termination()
    attempts = _Attempts(launcher, plan, call, records, snapshots, termination)
    history = attempts.history
    termination.leave = lambda: history.leave()
    try:
        outcomes = attempts.run()
        if timings is not None:
            timings.end_at("lost", history.attempt_began_at if history.has_begun_again else None)
            timings.end_at("slots", history.ranks_began_at)
        return outcomes, history.failures
    except KeyboardInterrupt as error:
        attempts.say_how_to_resume(is_terminated=isinstance(error, Terminated))
        raise
    finally:
        termination.leave = lambda: True  # what is left to do is to record the end
        remove_siblings(history.files)


class _Attempts:
    """The attempts of one run: the plan of each, and the history that the next begins from.

    See Note [More ranks again].
    """

    def __init__(
        self,
        launcher: Launcher,
        plan: Plan,
        call: Call,
        records: RunRecords | None,
        snapshots: SnapshotFolder | None,
        termination: Termination,
    ) -> None:
        self._termination = termination
        self._launcher, self._plan, self._call, self._records = launcher, plan, call, records
        changed = records.lost if records is not None else lambda _: None
        self.history = RunHistory(plan.config.max_failures, changed, snapshots, self._say)
        self.history.has_room = self._has_room
        self._now = plan
        """The plan of the present attempt."""
        self._smaller: Plan | None = None
        """The plan of the attempt before, if that was ended so that the present one has more ranks; else None."""

    def run(self) -> list[Outcome]:
        """Run attempts until one returns on all ranks; return its outcomes."""
        history = self.history
        if history.resumed is not None:
            self._say(f"the run continues from {history.resumed.place}")
            if self._records is not None:
                self._records.goes_on(history.resumed.place)
        while isinstance(result := self._run_once(), Exception):
            if self._smaller is not None and history.loss is None and not history.has_newer_snapshot():
                self._continue_with_fewer_ranks(self._smaller, result)
            elif not isinstance(result, LagomError):
                raise result
            elif isinstance(result, SnapshotError) and history.resumed is not None:
                if not history.failures:
                    raise result  # the user resumes a run, perhaps on the wrong machine: keep the snapshots
                self._say(f"{result}: the run restarts from the beginning")
                history.give_up_snapshots()
            elif history.loss is None or (self._plan.config.max_failures == 0 and history.loss.counts):
                raise result
            elif self._termination.is_told:
                raise Terminated from result  # the signal came while the attempt was ending
            elif history.loss.free_slots:
                self._continue_with_more_ranks(history.loss.free_slots)
            else:
                self._begin_again(history.loss, result)
        if self._termination.is_told:
            self._say("ended by SIGTERM, after it had returned")
        return result

    def _run_once(self) -> list[Outcome] | Exception:
        """Return the outcomes of an attempt, or its LagomError; a loss is then in the history.

        Raises:
            Exception: the program's own error; it is returned if the attempt before had fewer ranks.
        """
        history = self.history
        if self._termination.is_told:
            raise Terminated
        history.attempt_began()
        try:
            outcomes = self._launcher.run(self._now, self._call, self._records, history)
            reports = [outcome.report for outcome in outcomes if not outcome.report.ok]
            history.loss = history.loss or loss_in(reports, {})
            raise_failure(outcomes)
        except LagomError as error:
            return error
        except Exception as error:
            if self._smaller is None:
                raise
            return error
        return outcomes

    def _begin_again(self, loss: Loss, error: LagomError) -> None:
        """Prepare the attempt after ``loss``.

        Raises:
            LagomError: ``error``, if no further attempt is allowed or there are too few slots.
        """
        plan, history = self._plan, self.history
        if loss.counts:
            history.fail(loss)
        else:
            history.prepare()
        if loss.counts and len(history.failures) > plan.config.max_failures:
            raise self._ended(error, f"max_failures={plan.config.max_failures}") from error.__cause__
        # A run that has a snapshot takes more ranks when executors are back: it need not wait for them.
        wait_s = REPLACED_S if history.resumed is None else 0.0
        slots = self._launcher.slots_again(plan.num_slots, wait_s, loss.cut_off)
        if slots < self._least_slots:
            self._say(f"{loss.cause}; too few executors are left: waiting for others, {LAST_S:g} s at most")
            self._launcher.slots_again(self._least_slots, LAST_S)
            slots = self._launcher.slots_again(plan.num_slots, wait_s)
        size = min(plan.world_size, slots * plan.ranks_per_slot)
        if size < _least(plan):
            raise self._ended(error, _too_few(plan, size)) from error.__cause__
        self._smaller = None
        self._prepare(_with_ranks(plan, size), _announced(loss, history, size, plan))

    @property
    def _least_slots(self) -> int:
        """The slots of the fewest ranks with which the run may restart."""
        return _with_ranks(self._plan, _least(self._plan)).num_slots

    def _ended(self, error: LagomError, why: str) -> LagomError:
        """Put back the content that a new attempt cut off from files; add to the text of ``error`` why the run ends."""
        history = self.history
        put_back(history.files)
        num = max(1, len(history.failures))
        text = f"{error} (the run was started {num} time{'s' * (num != 1)}: {why})"
        if history.folder is not None and history.resumed is not None:
            text += f"; lagom resume {self._url or history.folder.run_dir} continues from {history.resumed.place}"
        error.args = (text, *error.args[1:])
        return error

    def say_how_to_resume(self, *, is_terminated: bool) -> None:
        """Say after Ctrl-C or SIGTERM how the run goes on, if it has kept a snapshot; after SIGTERM also if not."""
        folder, how = self.history.folder, "ended by SIGTERM" if is_terminated else "interrupted"
        if folder is not None and (newest := folder.newest()) is not None:
            # Ctrl-C does not wait for a last copy to a URL.
            place = newest.place if self._url is None else "the last snapshot that was copied there"
            self._say(f"{how}; lagom resume {self._url or folder.run_dir} continues from {place}")
        elif is_terminated:
            why = " (snapshot_every_s)" if folder is None else ""
            self._say(f"{how}; it has kept no snapshot{why}, so another call starts from the beginning")

    @property
    def _url(self) -> str | None:
        return self._records.upload.url if self._records is not None and self._records.upload is not None else None

    def _continue_with_more_ranks(self, free_slots: int) -> None:
        self.history.prepare()
        self._smaller = self._now
        slots = min(self._now.num_slots + free_slots, self._launcher.slots_again(self._plan.num_slots))
        slots = max(slots, self._now.num_slots)
        now = _with_ranks(self._plan, min(self._plan.world_size, slots * self._plan.ranks_per_slot))
        what = f"the run {_goes_on(self.history)}, with {now.world_size} ranks"
        self._prepare(now, f"there is room for more ranks; {what}")

    def _continue_with_fewer_ranks(self, smaller: Plan, error: Exception) -> None:
        self.history.prepare()
        self._smaller = None
        what = f"{type(error).__name__}: {message_of(error)}".partition("\n")[0]
        does = f"the run {_goes_on(self.history)}, with the ranks that it had before"
        self._prepare(smaller, f"with more ranks it failed: {what}; {does}")
        self.history.free_slots = lambda: 0

    def _prepare(self, now: Plan, text: str) -> None:
        self._now = now
        self.history.free_slots = self._free_slots if now.world_size < self._plan.world_size else lambda: 0
        self._say(text)
        if self._records is not None:
            self._records.begin_again(now.world_size)

    def _free_slots(self) -> int:
        """Return the number of free slots for which to end the present attempt; 0 if it is to go on."""
        running = self._now.num_slots
        if self.history.num_left == 0 or not self._launcher.free_slots(running, one_host=False):
            return 0  # a run that may not be lost again keeps to the hosts that it has
        return self._launcher.free_slots(running, one_host=self.history.files.on_one_disk())

    def _has_room(self) -> bool:
        """Return whether the run could begin again on the executors that Spark does not decommission."""
        try:
            return self._launcher.slots_again(self._plan.num_slots) >= self._least_slots
        except Exception:  # Spark's JVM may be gone, which the job shows as well
            return False

    def _say(self, text: str) -> None:
        """Tell the user ``text``, and record it."""
        text = f"lagom: {self._plan.name}: {text}"
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        if self._records is not None:
            self._records.said(text)


def _with_ranks(plan: Plan, world_size: int) -> Plan:
    return dataclasses.replace(plan, world_size=world_size)


def _least(plan: Plan) -> int:
    """Return the fewest ranks with which the run may restart."""
    least, config = plan.config.min_world_size, plan.config
    if least is not None:
        return min(least, plan.world_size)
    # In these three modes the global batch or the learning rate depends on the number of ranks: with fewer ranks the
    # training would be a different one.
    return plan.world_size if plan.already_distributed or config.batches == "per_rank" or config.lr_scaling else 1


def _too_few(plan: Plan, size: int) -> str:
    why = f"min_world_size={plan.config.min_world_size}"
    if plan.config.min_world_size is None:
        why = "with another number of ranks the global batch would change; set min_world_size to allow that"
        why = why if size else "no executor is left"
    return f"there is room for {size} of its {plan.world_size} ranks: {why}"


def _goes_on(history: RunHistory) -> str:
    return "restarts" if history.resumed is None else f"continues from {history.resumed.place}"


def _announced(loss: Loss, history: RunHistory, size: int, plan: Plan) -> str:
    where = f" (on {loss.host})" if loss.host and loss.host not in loss.cause else ""
    number = f"attempt {history.num_attempts} of {plan.config.max_failures + 1}" if loss.counts else "elsewhere"
    text = f"{loss.cause}{where}; the run {_goes_on(history)}, {number}"
    if size != plan.world_size:
        text += f", with {size} rank{'s' * (size != 1)} instead of {plan.world_size}"
        if plan.config.batches == "per_rank":
            text += ": the global batch is smaller by as much"
    return text


# Note [More ranks again]
#
# An executor that was lost is replaced within seconds, or, where a machine has to be found, within minutes. An attempt
# that begins from the beginning waits some seconds for the replacement, since without snapshots it would keep its
# number of ranks until the end. An attempt that continues from a snapshot does not wait. Whenever an attempt with fewer
# ranks than planned has kept a snapshot, the driver asks Spark for free slots (`RunView.watch`). If there are any, the
# driver ends the attempt as after a loss, and begins another one from this snapshot, with more ranks.
#
# More ranks must not cost the run anything that it would otherwise have kept. So no slots are used that run other jobs;
# none if the program has written files to the disk of one host, and executors are on several hosts; none if the next
# loss would end the run. If the larger attempt ends with an error before it has kept a snapshot, for example because
# the new executor lacks a package, the run goes on with the ranks that it had. An error of the program then comes
# again.
