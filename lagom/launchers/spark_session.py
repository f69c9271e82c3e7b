"""``SparkFacts``: the facts of a SparkSession, classic or Connect, that a run depends on."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

from lagom.cluster import Cluster
from lagom.errors import PlanError
from lagom.plan import Plan

log = logging.getLogger("lagom")
EXECUTORS_S = 90.0  # for Spark to start executors: those of a new application, and replacements of lost ones
REPLACED_S = 4.0  # for Spark to replace a lost executor, before a run begins again without it
IMPATIENT_S = 5.0  # before the user is told about the wait
_ENCRYPTION = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",  # no other setting implies it, not even spark.ssl.enabled
)
_SETTLED_S = 1.5  # without another executor, if nothing says how many there will be


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

    name: str
    bind: str | None
    """Address of this machine on which to listen for ranks; None if they cannot reach it."""
    advertise: str | None
    """Address by which ranks reach it, if that is another one."""

    def conf(self, key: str, default: str) -> str:
        """Return the session's setting ``key`` as text; ``default`` if it is not set."""
        value = self.session.conf.get(key, default)
        return default if value is None else str(value)

    def cluster(self) -> Cluster:
        """Return slots and GPUs, for the plan."""
        if self.dynamic:
            return self._elastic_cluster()
        return Cluster(
            launcher="spark",
            slots=self.slots(),
            encrypted=self.encrypted,
            gpus_per_slot=self._gpus_per_task(),
            remedy=_remedy(self.master),
        )

    @property
    def dynamic(self) -> bool:
        """Return whether executors come and go with demand; Spark then refuses barrier stages (SPARK-24942)."""
        return self.conf("spark.dynamicAllocation.enabled", "false").lower() == "true"

    @property
    def encrypted(self) -> bool:
        """Return whether the user asked for encryption between Spark's processes; see Note [Encryption of Spark]."""
        return any(self.conf(key, "false").lower() == "true" for key in _ENCRYPTION)

    @property
    def encrypts(self) -> bool:
        """Return whether Spark really encrypts."""
        return any(self.conf(key, "false").lower() == "true" for key in ("spark.authenticate", _ENCRYPTION[-1]))

    def slots(self) -> int:
        """Return the number of tasks that can run at the same time."""
        raise NotImplementedError

    def slots_again(self, wanted: int, cut_off: Set[str] = frozenset()) -> int:
        """Return how many of ``wanted`` tasks can run at the same time after a loss; see ``Launcher.slots_again``.

        Args:
            cut_off: names and addresses of hosts on which Spark must start no task, though it may not know it yet.
        """
        return wanted

    def tag(self, group: str, description: str) -> None:
        """Tag the jobs that this thread starts from now on, for ``cancel``."""
        raise NotImplementedError

    def cancel(self, group: str) -> None:
        """End the jobs that were started under ``group``."""
        raise NotImplementedError

    def thread_class(self) -> type[threading.Thread]:
        """Return the class of threads that may use the session."""
        return threading.Thread

    def map_tasks(self, function: Callable[..., Any], schema: str, plan: Plan) -> Sequence[Any]:
        """Run a job; return the rows that ``function`` yields in each task of ``plan``."""
        frame = self.session.range(0, plan.num_slots, 1, plan.num_slots)
        with self._python_of_tasks():
            mapped = frame.mapInArrow(function, schema, barrier=plan.barrier)
        rows: Sequence[Any] = mapped.collect()
        return rows

    @contextlib.contextmanager
    def _python_of_tasks(self) -> Iterator[None]:
        """Have functions sent to Spark in the context run in the right Python."""
        yield

    def _gpus_per_task(self) -> int:
        amount = float(self.conf("spark.task.resource.gpu.amount", "0"))
        # With a fraction, tasks share a GPU: each still sees one.
        return 0 if amount == 0 else max(1, int(amount))

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
            oversubscribe=not bounded,  # Spark gets the executors when asked for them
            gpus_per_slot=self._gpus_per_task(),
            barrier=False,
            encrypted=self.encrypted,
            remedy="raise spark.dynamicAllocation.maxExecutors",
        )


_python_lock = threading.Lock()
_settled: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Spark contexts that have their executors, with their number."""


class ClassicFacts(SparkFacts):
    """Asks a session whose JVM runs beside this process."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._context = session.sparkContext
        self.name = f"Spark {self.master}"
        if self.one_machine:
            self.bind, self.advertise = "127.0.0.1", None
        else:
            host = self.conf("spark.driver.host", "")
            self.bind, self.advertise = self.conf("spark.driver.bindAddress", host) or None, host

    def slots(self) -> int:
        """Return the scheduler's number, GPUs included; wait for executors that still start or are replaced."""
        jsc = self._context._jsc.sc()
        profile = jsc.resourceProfileManager().defaultResourceProfile()
        wanted = self._num_executors()
        if wanted != 0 and self._context in _settled:
            self._await(_settled[self._context], time.monotonic() + EXECUTORS_S)
        elif wanted != 0:
            age_s = time.time() - self._context.startTime / 1000
            self._await(wanted, time.monotonic() + EXECUTORS_S - age_s)
        if wanted != 0:  # a local master warns when it is asked for executors
            _settled[self._context] = self._executors()
        return int(jsc.maxNumConcurrentTasks(profile))

    def slots_again(self, wanted: int, cut_off: Set[str] = frozenset()) -> int:
        """See ``SparkFacts.slots_again``."""
        jsc = self._context._jsc.sc()
        if cut_off and not self.one_machine:
            _end_executors(jsc, cut_off)
        if self.dynamic:
            return wanted
        profile = jsc.resourceProfileManager().defaultResourceProfile()
        deadline = time.monotonic() + REPLACED_S
        while (slots := int(jsc.maxNumConcurrentTasks(profile))) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        return min(slots, wanted)

    def _executors(self) -> int:
        return int(self._context._jsc.sc().getExecutorIds().size())

    def _await(self, wanted: int | None, deadline: float) -> None:
        """Wait until ``deadline`` for ``wanted`` executors, or, if that is None, until no more start."""
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
        """Return the number of executors to wait for, or None if only the cluster knows it."""
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
    def _python_of_tasks(self) -> Iterator[None]:
        # On this machine, use this same Python unless the user named one: PATH's python3 may be another, as in a
        # notebook whose virtual environment is not activated.
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
    """Have Spark end and replace the executors on ``hosts``: by itself it misses them after two minutes."""
    ended = False
    try:
        executors = jsc.statusStore().executorList(True)
        for summary in (executors.apply(number) for number in range(executors.size())):
            name = str(summary.hostPort()).rpartition(":")[0].strip("[]")
            if summary.id() != "driver" and hosts & {name, *_addresses(name)}:
                log.info("Spark is told to end executor %s on %s, which is cut off", summary.id(), name)
                ended = bool(jsc.killAndReplaceExecutor(summary.id())) or ended
    except Exception as error:  # such as a master that is out of reach as well
        log.warning("Spark could not be told to end the executors that are cut off: %s", str(error).partition("\n")[0])
        return
    if not ended:
        log.warning("Spark knows no executor on %s, which is cut off; it may wait for it", ", ".join(sorted(hosts)))


def _addresses(name: str) -> set[str]:
    with contextlib.suppress(OSError):
        return {str(found[4][0]) for found in socket.getaddrinfo(name, None)}
    return set()


class ConnectFacts(SparkFacts):
    """Asks a session of Spark Connect, whose server may be anywhere."""

    _slots: dict[str, int] = {}  # noqa: RUF012  (by session: counting them takes a job)

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.name = f"Spark Connect {self.master}".rstrip()
        self.bind, self.advertise = _address_towards(session), None

    def slots(self) -> int:
        """Return Spark's default parallelism: a client can ask for no better number."""
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


def _address_towards(session: Any) -> str | None:
    """Return this machine's address on the way to the Connect server."""
    with contextlib.suppress(Exception):  # a session has no public attribute for its server's address
        host = session.client.host
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))
            return str(probe.getsockname()[0])
    return None


def _remedy(master: str) -> str:
    if master.startswith("local["):
        return "start the session with master('local[N]') for N ranks"
    if master.startswith("spark://"):
        return "give the application more cores (spark.cores.max, spark.executor.cores) or the cluster more workers"
    return "raise spark.executor.instances or spark.executor.cores"


# Note [Encryption of Spark]
#
# The user's settings count: AES or SASL between Spark's processes, or TLS between them (Spark 4). The first two have no
# effect without spark.authenticate: Spark then sends in clear, and with its jobs the secrets of runs. lagom warns, and
# still encrypts its channel. spark.io.encryption.enabled is about files on disks, and spark.ssl.enabled about web
# pages: neither counts.
