"""``SparkFacts``: the facts of a SparkSession, classic or Connect, that a run depends on; it also starts the job."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from lagom.cluster import NVIDIA, Cluster, other_kind
from lagom.errors import PlanError
from lagom.plan import Plan

log = logging.getLogger("lagom")
EXECUTORS_S = 90.0  # longest wait for executors, of a new application or replacements of lost executors
IMPATIENT_S = 5.0  # wait after which the user is told about it
_ENCRYPTION = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",  # no other setting implies it, not even spark.ssl.enabled
)
_SETTLED_S = 1.5  # time without a new executor, after which all count as started if their number is not known


def session_facts(session: Any) -> SparkFacts:
    """Return ``ConnectFacts`` or ``ClassicFacts`` of ``session``, by its kind."""
    if type(session).__module__.startswith("pyspark.sql.connect"):
        return ConnectFacts(session)
    return ClassicFacts(session)


class SparkFacts:
    """Asks a Spark session for its settings and slots, and runs tasks in it; for both kinds of session."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.master: str = self.conf("spark.master", "")
        self.one_machine = self.master.startswith("local")
        """Whether the executors are on this machine, and so see its files."""

    broadcasts = False
    """Whether Spark can broadcast; it cannot with Connect."""
    name: str
    bind: str | None
    """Address of this machine on which to listen for ranks; None if ranks cannot reach this machine."""
    advertise: str | None
    """Address at which ranks reach this machine; None if it is ``bind``."""

    def conf(self, key: str, default: str) -> str:
        """Return the session's setting ``key`` as text; ``default`` if it is not set."""
        value = self.session.conf.get(key, default)
        return default if value is None else str(value)

    def cluster(self) -> Cluster:
        """Return the facts about slots, GPUs and encryption from which a plan is made.

        Raises:
            PlanError: for dynamic allocation with spark.speculation.
        """
        if self.dynamic:
            return self._elastic_cluster()
        return Cluster(
            launcher="spark",
            slots=self.slots(),
            encrypted=self.encrypted,
            **self._devices_per_task(),
            remedy=_remedy(self.master),
        )

    @property
    def dynamic(self) -> bool:
        """Whether Spark allocates executors dynamically; it then refuses barrier stages (SPARK-24942)."""
        return self.conf("spark.dynamicAllocation.enabled", "false").lower() == "true"

    @property
    def encrypted(self) -> bool:
        """Whether the user has set encryption between Spark's processes; see Note [Encryption of Spark]."""
        return any(self.conf(key, "false").lower() == "true" for key in _ENCRYPTION)

    @property
    def encrypts(self) -> bool:
        """Whether encryption, if set, takes effect: without spark.authenticate, most of its settings do nothing."""
        return any(self.conf(key, "false").lower() == "true" for key in ("spark.authenticate", _ENCRYPTION[-1]))

    def slots(self) -> int:
        """Return the number of tasks that can run at the same time."""
        raise NotImplementedError

    def slots_again(self, wanted: int, wait_s: float = 0.0, cut_off: Set[str] = frozenset()) -> int:
        """Return ``wanted``: a Connect client cannot ask for the number of slots. See ``Launcher.slots_again``."""
        return wanted

    def free_slots(self, running: int, *, one_host: bool) -> int:
        """Return 0: a Connect client cannot ask for the number of slots. See ``Launcher.free_slots``."""
        return 0

    hears_decommissions = False
    """Whether Spark tells this process which executors it decommissions."""

    def tasks_of(self, group: str, most: int) -> Sequence[tuple[int, str, str]]:
        """Return number, executor and host of at most ``most`` started tasks with the tag ``group``.

        Only if ``hears_decommissions``.
        """
        raise NotImplementedError

    def is_decommissioned(self, executor: str) -> bool:
        """Return whether Spark decommissions ``executor``: it gets no more tasks. Only if ``hears_decommissions``."""
        raise NotImplementedError

    def tag(self, group: str, description: str) -> None:
        """Tag the jobs that this thread starts from now on with ``group``, so that ``cancel`` finds them."""
        raise NotImplementedError

    def cancel(self, group: str) -> None:
        """Cancel the jobs that are tagged with ``group``."""
        raise NotImplementedError

    def thread_class(self) -> type[threading.Thread]:
        """Return the class of thread from which the session may be used."""
        return threading.Thread

    def map_tasks(self, function: Callable[..., Any], schema: str, plan: Plan) -> Sequence[Any]:
        """Run a job; return the rows that ``function`` yields in each task of ``plan``."""
        frame = self.session.range(0, plan.num_slots, 1, plan.num_slots)
        with self.python_of_tasks():
            mapped = frame.mapInArrow(function, schema, barrier=plan.barrier)
        rows: Sequence[Any] = mapped.collect()
        return rows

    def broadcast(self, fd: int) -> contextlib.AbstractContextManager[Any]:
        """Context manager that has Spark copy the file ``fd`` to all executors.

        It yields Spark's broadcast, whose value has the content as bytes. Only if ``broadcasts``.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def python_of_tasks(self) -> Iterator[None]:
        """Context manager that sets the Python in which Spark's tasks run; Connect sets none."""
        yield

    def _devices_per_task(self) -> dict[str, Any]:
        """Return the facts about accelerators, whose kind is that of this Python's torch: executors have the same."""
        amount = float(self.conf("spark.task.resource.gpu.amount", "0"))
        if amount == 0:
            return {}
        # With a fraction, several tasks share a GPU, and each task still sees one GPU.
        return {"gpus_per_slot": max(1, int(amount)), "device_kind": other_kind() or NVIDIA}

    def _elastic_cluster(self) -> Cluster:
        if self.conf("spark.speculation", "false").lower() == "true":
            raise PlanError("Spark would start second copies of ranks; set spark.speculation=false")
        now = self.slots()
        most = self.conf("spark.dynamicAllocation.maxExecutors", "infinity")
        cores = int(self.conf("spark.executor.cores", "1")) // int(self.conf("spark.task.cpus", "1"))
        bounded = most.isdigit() and int(most) < 2**31 - 1
        return Cluster(
            launcher="spark",
            slots=int(most) * max(1, cores) if bounded else max(1, now),
            oversubscribe=not bounded,  # without a bound, Spark allocates as many executors as the job needs
            **self._devices_per_task(),
            barrier=False,
            encrypted=self.encrypted,
            remedy="raise spark.dynamicAllocation.maxExecutors",
        )


_python_lock = threading.Lock()
_settled: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Spark contexts whose executors have started, with the number of executors."""


class ClassicFacts(SparkFacts):
    """Facts of a classic session, whose driver's JVM is on this machine."""

    broadcasts = True

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._context = session.sparkContext
        self.name = f"Spark {self.master}"
        if self.one_machine:
            self.bind, self.advertise = "127.0.0.1", None
        else:
            host = self.conf("spark.driver.host", "")
            self.bind, self.advertise = self.conf("spark.driver.bindAddress", host) or None, host

    @contextlib.contextmanager
    def broadcast(self, fd: int) -> Iterator[Any]:
        """See ``SparkFacts.broadcast``."""
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
            buffer = pickle.PickleBuffer(content)
            try:
                sent = self._context.broadcast(buffer)  # PySpark pickles it to a file, without another copy in memory
            finally:
                buffer.release()
        try:
            yield sent
        finally:
            with contextlib.suppress(Exception):  # the JVM may be gone
                sent.destroy()

    def slots(self) -> int:
        """Return the scheduler's number of task slots, which depends on cores and GPUs.

        Wait first for executors that are starting, or that replace lost ones.
        """
        jsc = self._context._jsc.sc()
        profile = jsc.resourceProfileManager().defaultResourceProfile()
        wanted = self._num_executors()
        if wanted != 0 and self._context in _settled:
            self._await(_settled[self._context], time.monotonic() + EXECUTORS_S)
        elif wanted != 0:
            age_s = time.time() - self._context.startTime / 1000
            self._await(wanted, time.monotonic() + EXECUTORS_S - age_s)
        if wanted != 0:  # a local master logs a warning when its executors are counted
            _settled[self._context] = self._executors()
        return int(jsc.maxNumConcurrentTasks(profile))

    def slots_again(self, wanted: int, wait_s: float = 0.0, cut_off: Set[str] = frozenset()) -> int:
        """See ``Launcher.slots_again``; Spark is told of ``cut_off``, which it may not have noticed yet.

        Return ``wanted`` with dynamic allocation.
        """
        jsc = self._context._jsc.sc()
        if cut_off and not self.one_machine:
            _end_executors(jsc, cut_off)
        if self.dynamic:
            return wanted
        profile = jsc.resourceProfileManager().defaultResourceProfile()
        deadline = time.monotonic() + wait_s
        while (slots := int(jsc.maxNumConcurrentTasks(profile))) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        return min(slots, wanted)

    def free_slots(self, running: int, *, one_host: bool) -> int:
        """See ``Launcher.free_slots``; return 0 with dynamic allocation."""
        jsc = self._context._jsc.sc()
        executors = list(_executor_list(jsc))
        if self.dynamic or (one_host and len({host for _, host, _ in executors}) > 1):
            return 0
        profile = jsc.resourceProfileManager().defaultResourceProfile()
        # Spark counts running tasks late, and those of executors whose end it has not noticed.
        busy = max(running, sum(tasks for _, _, tasks in executors))
        return max(0, int(jsc.maxNumConcurrentTasks(profile)) - busy)

    @property
    def hears_decommissions(self) -> bool:  # type: ignore[override]
        """See ``SparkFacts.hears_decommissions``."""
        return not self.one_machine

    def tasks_of(self, group: str, most: int) -> Sequence[tuple[int, str, str]]:
        """See ``SparkFacts.tasks_of``."""
        tracker, store, found = self._context.statusTracker(), self._context._jsc.sc().statusStore(), []
        for job in tracker.getJobIdsForGroup(group):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info is not None else ():
                tasks = store.taskList(stage, 0, most)
                each = (tasks.apply(number) for number in range(tasks.size()))
                found += [(int(task.index()), str(task.executorId()), str(task.host())) for task in each]
        return found

    def is_decommissioned(self, executor: str) -> bool:
        """See ``SparkFacts.is_decommissioned``."""
        return bool(self._context._jsc.sc().taskScheduler().getExecutorDecommissionState(executor).isDefined())

    def _executors(self) -> int:
        return int(self._context._jsc.sc().getExecutorIds().size())

    def _await(self, wanted: int | None, deadline: float) -> None:
        """Wait for ``wanted`` executors, or, if it is None, until none has started for ``_SETTLED_S``.

        Return at ``deadline``, by ``time.monotonic``, in any case.
        """
        start = since = time.monotonic()
        seen, told = -1, False
        while (now := time.monotonic()) < deadline:
            if (executors := self._executors()) != seen:
                seen, since = executors, now
            if executors and (executors >= wanted if wanted else now - since > _SETTLED_S):
                return
            if not told and now - start > IMPATIENT_S:
                told = True
                all_of = f" of {wanted}" if wanted else ""
                log.warning("%d%s executors are there; waiting for Spark, for %.0f s", seen, all_of, deadline - now)
            time.sleep(0.05)

    def _num_executors(self) -> int | None:
        """Return the number of executors to wait for: 0 for no wait, None if no setting says the number."""
        if matched := re.match(r"local-cluster\[ *(\d+)", self.master):
            return int(matched[1])
        if self.one_machine or self.dynamic:
            return 0
        number = self.conf("spark.executor.instances", "")
        return int(number) if number.isdigit() else None

    def tag(self, group: str, description: str) -> None:
        """See ``SparkFacts.tag``."""
        self._context.setJobGroup(group, description, interruptOnCancel=True)

    def cancel(self, group: str) -> None:
        """See ``SparkFacts.cancel``."""
        self._context.cancelJobGroup(group)

    @contextlib.contextmanager
    def python_of_tasks(self) -> Iterator[None]:
        # With a local master, run tasks in the Python of this process unless the user has named another. Spark's
        # default is python3 on PATH, a different Python in a notebook whose virtual environment is not activated.
        with _python_lock:
            before = self._context.pythonExec
            if self.one_machine and before == "python3" and "PYSPARK_PYTHON" not in os.environ:
                self._context.pythonExec = sys.executable
            try:
                yield
            finally:
                self._context.pythonExec = before

    def thread_class(self) -> type[threading.Thread]:
        """Return the class of threads that inherit Spark's local properties."""
        from pyspark import InheritableThread

        return InheritableThread


def _end_executors(jsc: Any, hosts: Set[str]) -> None:
    """Tell Spark to end and replace the executors on ``hosts``: by itself it would notice their loss in two minutes."""
    ended = False
    try:
        for executor, host, _ in _executor_list(jsc):
            if hosts & {host, *_addresses(host)}:
                log.info("Spark is told to end executor %s on %s, which is cut off", executor, host)
                ended = bool(jsc.killAndReplaceExecutor(executor)) or ended
    except Exception as error:  # for example, the master may be out of reach as well
        log.warning("Spark could not be told to end the executors that are cut off: %s", str(error).partition("\n")[0])
        return
    if not ended:
        log.warning("Spark knows no executor on %s, which is cut off; it may wait for it", ", ".join(sorted(hosts)))


def _executor_list(jsc: Any) -> Iterator[tuple[str, str, int]]:
    """Yield id, host and number of running tasks of each executor."""
    found = jsc.statusStore().executorList(True)
    for summary in (found.apply(number) for number in range(found.size())):
        if summary.id() != "driver":
            yield summary.id(), str(summary.hostPort()).rpartition(":")[0].strip("[]"), int(summary.activeTasks())


def _addresses(name: str) -> set[str]:
    with contextlib.suppress(OSError):
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    return set()


class ConnectFacts(SparkFacts):
    """Facts of a Spark Connect session, whose server may be on any host."""

    _slots: dict[str, int] = {}  # noqa: RUF012  (by session id, since counting slots takes a Spark job)

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.name = f"Spark Connect {self.master}".rstrip()
        ours, servers = _route_to_server(session)
        self.bind, self.advertise = ours, None
        # A server on another host, too, may have the master local[...].
        is_here = ours is not None and (ours == servers or ours.startswith("127."))
        self.one_machine = self.one_machine and is_here

    def slots(self) -> int:
        """Return Spark's default parallelism, since a Connect client cannot ask for the number of slots."""
        if matched := re.fullmatch(r"local\[(\d+)(,\d+)?\]", self.master):
            return int(matched[1])
        session_id = str(self.session.session_id)
        if session_id not in self._slots:
            from pyspark.sql.functions import spark_partition_id

            frame = self.session.range(0, 1 << 16).select(spark_partition_id().alias("part"))
            self._slots[session_id] = int(frame.distinct().count())
        return self._slots[session_id]

    def tag(self, group: str, description: str) -> None:
        """See ``SparkFacts.tag``."""
        self.session.addTag(group)

    def cancel(self, group: str) -> None:
        """See ``SparkFacts.cancel``."""
        self.session.interruptTag(group)


def _route_to_server(session: Any) -> tuple[str, str] | tuple[None, None]:
    """Return the address from which this machine reaches the Connect server, and the server's; None if not known."""
    with contextlib.suppress(Exception):  # a session has no public attribute for its server's address
        host = session.client.host
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))
            return str(probe.getsockname()[0]), str(probe.getpeername()[0])
    return None, None


def _remedy(master: str) -> str:
    if master.startswith("local["):
        return "start the session with master('local[N]') for N ranks"
    if master.startswith("spark://"):
        return "give the application more cores (spark.cores.max, spark.executor.cores) or the cluster more workers"
    return "raise spark.executor.instances or spark.executor.cores"


# Note [Encryption of Spark]
#
# lagom encrypts if the user has set AES or SASL between Spark's processes, or TLS between them (Spark 4). AES and SASL
# have no effect without spark.authenticate: Spark then sends its jobs unencrypted, and in them the secrets of lagom's
# runs. lagom warns, and still encrypts its channel. spark.io.encryption.enabled (files on disks) and spark.ssl.enabled
# (web pages) do not count.
