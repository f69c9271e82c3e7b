"""``SparkLauncher``: runs one Spark job, a barrier job as a rule, whose tasks fork the ranks on the executors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import platform
import secrets
import signal
import ssl
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from lagom.cluster import Cluster
from lagom.digests import digest_of
from lagom.driver.protocol import Outcome
from lagom.driver.run import RunView
from lagom.errors import LagomError, PlanError
from lagom.plan import Plan
from lagom.program import user_folder
from lagom.program.payload import Parcel
from lagom.program.shipped_packages import Shipment, ship_packages
from lagom.program.signature import Call
from lagom.program.sources import is_installed, lagom_zip, modules_zip
from lagom.restart.history import RunHistory
from lagom.restart.kept_snapshots import SnapshotPlace
from lagom.spark import spark_task as task_module
from lagom.spark.decommissions import decommissions_announced
from lagom.spark.spark_failure import full_text, own_message, why_it_failed
from lagom.spark.spark_job import SparkJob
from lagom.spark.spark_master import check_packages, start_session
from lagom.spark.spark_results import OutcomeCollector
from lagom.spark.spark_session import SparkFacts, session_facts
from lagom.watch.run_dir import RunRecords
from lagom.wire.failure_text import failure_in
from lagom.wire.framing import anonymous_file
from lagom.wire.spec import RunSpec
from lagom.wire.tls import NoCertificate, certificate_of_a_run, key_and_certificate

log = logging.getLogger("lagom")
_INLINE = 1 << 20  # bytes; a larger payload is not sent in the job itself, unless hosts cannot get it elsewhere
CANCELLED_S = 10.0  # longest wait for a cancelled job after a loss or failure; Spark notices lost executors late
CANCEL_S = 2.0  # time in which stopped tasks can return by themselves, before the job is cancelled
_RESULT_S = 8.0  # the same after a failure: the task returns the program's exception, which a busy host may do late


class SparkLauncher:
    """Runs ranks on the executors of a Spark session, classic or Connect.

    Args:
        session: the session; None starts one.

    Raises:
        LagomError: if PySpark or Java is missing, or Spark does not start.
    """

    def __init__(self, session: Any = None) -> None:
        check_packages()
        self.facts: SparkFacts = session_facts(session if session is not None else start_session())

    def cluster(self) -> Cluster:
        """Return the task slots, as Spark counts them."""
        return self.facts.cluster()

    def where(self) -> str:
        """Return the place where ranks run, as a text for the user."""
        return self.facts.name

    def slots_again(self, wanted: int, wait_s: float = 0.0, cut_off: Set[str] = frozenset()) -> int:
        """See ``Launcher.slots_again``."""
        with plain_interrupt():
            return self.facts.slots_again(wanted, wait_s, cut_off)

    def free_slots(self, running: int, *, one_host: bool) -> int:
        """See ``Launcher.free_slots``."""
        try:
            return self.facts.free_slots(running, one_host=one_host)
        except Exception as error:  # Spark may refuse to tell, or its JVM may be gone, which the job shows as well
            log.info("Spark's free slots are not known: %s", str(error).partition("\n")[0])
            return 0

    def run(
        self, plan: Plan, call: Call, records: RunRecords | None = None, history: RunHistory | None = None
    ) -> list[Outcome]:
        """See ``Launcher.run``."""
        with contextlib.ExitStack() as stack:
            keeps = history is not None and plan.rehearsal is None
            payload = stack.enter_context(SparkPayload(call, history if keeps else None))
            run = RunView(
                plan,
                self.where(),
                can_gather=plan.barrier,
                payload_fd=payload.fd,
                snapshot_fd=payload.snapshot_fd,
                records=records,
                history=history,
            )
            stack.enter_context(run)
            tls, certificate = encryption(self.facts) if plan.encrypted else (None, "")
            of_ranks = key_and_certificate() if plan.encrypted else ""
            address = self._listen(run, tls)
            if address is None:
                run.unheard()
            modules = b"" if self.facts.one_machine else modules_zip(call.function)
            spec = payload.spec(plan, address, run.channel.secret, modules, self.facts)
            if history is not None and address is not None:
                place = payload.with_digest(history.snapshots)
                spec = dataclasses.replace(spec, files=history.files_before(), snapshots=place)
            spec = dataclasses.replace(spec, certificate=certificate, rank_certificate=of_ranks)
            rows = self.run_job(run, plan, spec, stack, payload.broadcast(self.facts, spec))
            home = OutcomeCollector(rows, run)
            if home.all_returned or history is None or not history.begins_again(run.loss()):
                home.unpack_files(spec.cwd)
            return home.outcomes()

    def survey(self, plan: Plan, driver: tuple[str, int] | None) -> Sequence[Mapping[str, Any]]:
        """Return facts about each task of ``plan``, collected by a Spark job; see ``lagom.spark.spark_survey``."""
        from lagom.spark.spark_survey import survey

        return survey(self.facts, plan, driver)

    def _listen(self, run: RunView, tls: ssl.SSLContext | None) -> tuple[str, int] | None:
        if self.facts.bind is None:
            return None
        try:
            bound = run.channel.listen(self.facts.bind, run.plan.num_slots, tls)
        except OSError:  # the address belongs to another machine (NAT): ranks find each other without the driver
            return None
        return (self.facts.advertise or bound[0], bound[1])

    def run_job(
        self, run: RunView, plan: Plan, spec: RunSpec, stack: contextlib.ExitStack, payload: Any = None
    ) -> Sequence[Any]:
        """Run the job in another thread, and show the run from this thread; return the rows of all tasks.

        End the job on Ctrl-C and failures. After a failure of a rank, rows may be missing.

        Args:
            stack: restores PySpark's handler of Ctrl-C when it is closed.
            payload: Spark's broadcast of the payload; None if there is none.

        Raises:
            LagomError: if tasks were lost, or Spark's job failed without a failure of a rank.
        """
        group = f"lagom-{spec.run_id}"
        function = task_of(spec, payload)

        def job() -> Sequence[Any]:
            self.facts.tag(group, f"lagom: {plan.name} on {plan.world_size} ranks")
            return self.facts.map_tasks(function, task_module.SCHEMA, plan)

        stack.enter_context(plain_interrupt())
        running = SparkJob(job, self.facts.thread_class(), run.finish)
        try:
            running.start()
            with decommissions_announced(self.facts, group, plan, run.announce):
                run.watch()
            if run.stopped:
                self.end_job(running, run, group)
                running.wait(CANCELLED_S)
                if running.lasts and (lost := run.lost()) is not None:
                    raise lost
                if running.lasts and run.failures():  # do not wait: Spark may never notice the end of an executor
                    return []
            running.wait()
        except BaseException:  # Ctrl-C, or an error of this process, such as a signal handler's
            run.stop()
            self.end_job(running, run, group)
            raise
        try:
            return running.result()  # type: ignore[no-any-return]
        except Exception as error:
            if "ExecutorLostFailure" in full_text(error):
                run.lose_executor()
            if (lost := run.lost()) is not None:
                raise lost from error
            return rows_of_failure(error, run)

    def end_job(self, running: SparkJob, run: RunView, group: str) -> None:
        """Let stopped tasks return, then cancel the rest, which ends Spark's Python workers."""
        try:
            patience_s = _RESULT_S if run.failures() else CANCEL_S
            running.wait(patience_s if run.has_tasks else 0.0)
        finally:  # also when Ctrl-C is pressed once more
            if running.lasts:
                with contextlib.suppress(Exception):
                    self.facts.cancel(group)


def encryption(facts: SparkFacts) -> tuple[ssl.SSLContext, str]:
    """Return the TLS context of the driver's channel, and the certificate that ranks check.

    Raises:
        PlanError: if no certificate can be made on this machine.
    """
    if not facts.encrypts:
        log.warning(
            "Spark's encryption is on, but spark.authenticate is not, without which Spark sends in clear: its jobs, "
            "and in them the secrets of lagom's runs; set spark.authenticate=true"
        )
    try:
        return certificate_of_a_run()
    except NoCertificate as error:
        raise PlanError(
            f"Spark encrypts what it sends, and lagom's connections to the ranks cannot be: {error}. "
            "On the driver: pip install cryptography, or install openssl"
        ) from error


class SparkPayload:
    """Files of a run in this process: other hosts fetch them, and processes of this host open them by path.

    Args:
        call: the call, which is pickled into an anonymous file.
        history: if it has a snapshot folder, the pickled call in this folder is sent instead of ``call``, since
            snapshots refer to it.
    """

    def __init__(self, call: Call, history: RunHistory | None = None) -> None:
        self.snapshot_fd: int | None = None
        with contextlib.ExitStack() as stack:

            def closed_with_run(fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            self._token = closed_with_run(anonymous_file("token"))
            if history is None or history.folder is None:
                self.fd = closed_with_run(anonymous_file("payload"))
                Parcel(call).write(self.fd)
            else:
                self.fd = closed_with_run(history.folder.open_call(os.O_RDWR))
                if history.resumed is not None:
                    self.snapshot_fd = closed_with_run(history.folder.open_state(history.resumed.number))
            self._files = stack.pop_all()

    def __enter__(self) -> SparkPayload:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def broadcast(self, facts: SparkFacts, spec: RunSpec) -> Any:
        """Have Spark copy the payload to all executors, until this object is closed; return Spark's broadcast.

        Return None if ``spec`` has the payload, executors open it by its path, or Spark cannot broadcast.
        """
        if spec.payload is not None or facts.one_machine or not facts.broadcasts:
            return None
        with plain_interrupt():
            return self._files.enter_context(facts.broadcast(self.fd))

    def with_digest(self, place: SnapshotPlace | None) -> SnapshotPlace | None:
        """Return ``place`` with the digest of the resumed snapshot, which hosts may fetch; unchanged without one."""
        if place is None or place.resumed is None or self.snapshot_fd is None:
            return place
        return dataclasses.replace(place, sha256=place.resumed.facts["sha256"])

    def spec(
        self, plan: Plan, address: tuple[str, int] | None, secret: bytes, modules: bytes, facts: SparkFacts
    ) -> RunSpec:
        """Return the spec of the run for host processes.

        Args:
            address: where the driver listens; None if executors cannot reach it.
            modules: zip of the user's modules.
            facts: they say whether executors run on this machine, and so open the payload by its path, and whether
                Spark can broadcast it.

        Raises:
            PlanError: if the packages that are to be sent are too large.
        """
        shipment = ship_packages(plan.packages) if plan.config.packages == "ship" else Shipment()
        run_id = secrets.token_hex(8)
        here = f"/proc/{os.getpid()}/fd"
        os.pwrite(self._token, f"{run_id}\n{here}/{self.fd}\n".encode(), 0)
        size = os.fstat(self.fd).st_size
        has_way = facts.one_machine or facts.broadcasts
        inline = size <= _INLINE or (address is None and not has_way)
        return RunSpec(
            run_id=run_id,
            plan=plan,
            env=changed_environment(),
            whole_env=False,
            cwd=os.getcwd(),
            sys_path=tuple(path for entry in sys.path if not is_installed(path := os.path.abspath(entry))),
            argv=tuple(sys.argv),
            python=".".join(platform.python_version_tuple()[:2]),
            token=f"{here}/{self._token}",
            payload_size=size,
            payload=_content(self.fd) if inline else None,
            payload_sha256="" if inline or has_way else digest_of(self.fd),
            modules_zip=modules,
            packages_zip=shipment.archive,
            shipped=shipment.distributions,
            address=address,
            secret=secret,
        )


def _content(fd: int) -> bytes:
    with open(fd, "rb", closefd=False) as file:
        file.seek(0)
        return file.read()


def pickled(spec: RunSpec) -> bytes:
    """Pickle ``spec`` by reference to lagom's classes; executors unpickle it after they have imported lagom."""
    import pickle

    return pickle.dumps(spec)


def task_of(spec: RunSpec, payload: Any) -> Callable[..., Any]:
    """Return the function of the tasks of ``spec``; ``payload`` is Spark's broadcast of the payload, or None."""
    # The broadcast is added to the travelling function: unpickled in this process, it would be one of an executor.
    return task_by_value(task_module.spark_task)(lagom_zip(), pickled(spec), payload)  # type: ignore[no-any-return]


def task_by_value(
    function: Callable[..., Any], modules: Sequence[ModuleType] = (task_module, user_folder)
) -> Callable[..., Any]:
    """Return a copy of ``function`` that cloudpickle pickles by value, so that executors unpickle it without lagom.

    Args:
        modules: those of lagom whose functions and classes ``function`` uses.
    """
    from pyspark import cloudpickle as untyped

    cloudpickle: Any = untyped
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        frozen = cloudpickle.dumps(function)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    travelling: Callable[..., Any] = cloudpickle.loads(frozen)
    return travelling


def rows_of_failure(error: Exception, run: RunView) -> Sequence[Any]:
    """Return the row of the failed rank, decoded from Spark's error text, as if the task had returned it.

    Return no rows if the text has no failure but the channel reported one.

    Raises:
        LagomError: if neither has a rank's failure; the error has the text of lagom's or Spark's error on the executor.
    """
    text = full_text(error)
    failure = failure_in(text)
    if failure is not None:
        body, data = json.loads(failure[0]), failure[1]
        body["output"] = body.get("output", []) + json.loads(failure[2])
        return [{"rank": body["rank"], "name": "outcome", "part": 0, "data": data, "report": json.dumps(body)}]
    if run.failures():
        return []
    if own := own_message(text):
        raise LagomError(own) from error
    raise LagomError(f"Spark's job failed: {why_it_failed(error)}") from error


@contextmanager
def plain_interrupt() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt in the context; PySpark's handler would call the JVM amid another call.

    Do nothing outside the main thread, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# Prefixes of variables that are not sent: pyspark sets them in the driver, or their values depend on the machine.
_NOT_SENT = (
    "SPARK_",
    "PYSPARK_",
    "JAVA_",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "CUDA_VISIBLE_DEVICES",
)


@functools.cache
def _environment_at_start() -> dict[str, str]:
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {key: value for key, _, value in pairs}


def changed_environment() -> dict[str, str]:
    """Return the environment variables that this program has set or changed since its start, but for ``_NOT_SENT``.

    Only they are sent to executors: the other variables describe this machine.
    """
    start = _environment_at_start()
    return {
        key: value for key, value in os.environ.items() if start.get(key) != value and not key.startswith(_NOT_SENT)
    }
