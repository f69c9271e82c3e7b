"""Spark on this machine, of every kind that lagom runs on; each is gone when its ``with`` ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lagom.on_rank.rank_process import die_with
from tests.installed import install
from tests.integration import hosts

_START_S = 120.0
ARCHIVE = Path(sys.prefix, "spark.jsa")
"""Spark's classes as a JVM keeps them, where ``make`` has had them written: see ``archive_classes``."""
_QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
JVM = f"{_QUICK} -Xlog:disable -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else _QUICK
"""Options of Spark's JVMs, which live for seconds: they start on a quarter of the CPU time."""
_CONF = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.extraJavaOptions": JVM,
    "spark.log.level": "OFF",
}


@contextmanager
def local(cores: int) -> Iterator[Any]:
    """A session on threads of its own JVM."""
    with session(f"local[{cores}]") as spark:
        yield spark


@contextmanager
def local_cluster() -> Iterator[Any]:
    """Two executors of one core, each a process, as Spark's own tests have them."""
    with session("local-cluster[2,1,1024]") as spark:
        yield spark


_ENCRYPTION = {
    "spark.authenticate": "true",
    "spark.authenticate.secret": "known-to-these-tests",
    "spark.network.crypto.enabled": "true",
}


@contextmanager
def encrypted(master: str) -> Iterator[Any]:
    """Spark with its AES on; of use to Spark itself only where executors are processes of their own."""
    with session(master, conf=_ENCRYPTION) as spark:
        yield spark


@contextmanager
def standalone(conf: Mapping[str, str] | None = None, cores: int = 1) -> Iterator[Any]:
    """A master and two workers on loopback, whose Python has no lagom."""
    with bare_python() as python, spark_master() as url, spark_worker(url, cores), spark_worker(url, cores):
        settings = {"spark.executor.memory": "512m", "spark.executor.instances": "2", "spark.executor.cores": "1"}
        with session(url, str(python), settings | dict(conf or {})) as spark:
            yield spark


@contextmanager
def decommissioning() -> Iterator[Any]:
    """A master without workers, for two executors of as many cores as their workers have: ``decommissioned_worker``."""
    with spark_master() as url:
        conf = {"spark.executor.memory": "512m", "spark.executor.instances": "2", "spark.decommission.enabled": "true"}
        with session(url, conf=conf) as spark:
            yield spark


@contextmanager
def decommissioned_worker(spark: Any, cores: int) -> Iterator[None]:
    """A worker whose machine goes when it receives SIGPWR."""
    with spark_worker(spark.sparkContext.master, cores, options="-Dspark.decommission.enabled=true"):
        yield


@contextmanager
def connect() -> Iterator[Any]:
    """A client of a Spark Connect server in another process."""
    from pyspark.sql.connect.session import SparkSession

    conf = _CONF | {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": "0"}
    args = [arg for key, value in conf.items() if key != "spark.log.level" for arg in ("--conf", f"{key}={value}")]
    server = ["spark-submit", "--master", "local[2]", *args, "--class", "org.apache.spark.sql.connect.service"]
    server[-1] += ".SparkConnectServer"
    env = {"PYSPARK_PYTHON": sys.executable, "SPARK_DAEMON_MEMORY": "1g"}
    with daemon([*server, "spark-internal"], r"started at: .*:(\d+)", env) as port:
        spark = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").create()
        try:
            yield spark
        finally:
            spark.stop()


@contextmanager
def foreign(encryption: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Two executors, one of two tasks, on hosts of their own: other processes, files and network addresses."""
    encryption = encryption or {}
    options = " ".join(f"-D{key}={value}" for key, value in encryption.items())
    with ExitStack() as stack:
        here, there = stack.enter_context(hosts.network(2))
        python = stack.enter_context(bare_python())
        url = stack.enter_context(spark_master(here, options))
        for host, cores in zip(there, (2, 1), strict=True):
            stack.enter_context(spark_worker(url, cores, host.address, host.command, options))
        conf = {"spark.driver.host": here, "spark.executor.memory": "512m", "spark.executor.instances": "2"}
        yield stack.enter_context(session(url, str(python), {**conf, **encryption}))


@contextmanager
def dynamic() -> Iterator[Any]:
    """Executors that come and go with demand, two at most."""
    conf = {"enabled": "true", "shuffleTracking.enabled": "true", "maxExecutors": "2", "initialExecutors": "0"}
    with standalone({f"spark.dynamicAllocation.{key}": value for key, value in conf.items()}) as spark:
        yield spark


@contextmanager
def elastic() -> Iterator[Any]:
    """Executors that come and go with demand, without a limit in Spark, and that leave after two idle seconds."""
    conf = {"enabled": "true", "shuffleTracking.enabled": "true", "initialExecutors": "0", "executorIdleTimeout": "2s"}
    with standalone({f"spark.dynamicAllocation.{key}": value for key, value in conf.items()}) as spark:
        yield spark


@contextmanager
def packed() -> Iterator[Any]:
    """Two executors that run the Python of an archive of ``lagom pack``, which has a package "packed" of its own."""
    with tempfile.TemporaryDirectory(prefix="lagom-packed-") as folder, bare_python(torch=False) as python:
        (packages,) = python.parents[1].glob("lib/python*/site-packages")
        main = Path(sysconfig.get_paths()["purelib"])
        for path in main.iterdir():  # by links, which the archive keeps: torch is large
            if not path.name.startswith("lagom") and path.suffix != ".pth" and not (packages / path.name).exists():
                (packages / path.name).symlink_to(path)
        install(packages, "packed", "1.0", {"packed.py": "x = 11"})
        archive, root = Path(folder, "env.tar.gz"), Path(__file__).parents[2]
        command = [str(python), "-m", "lagom", "pack", "-o", str(archive)]
        env = {"PYTHONPATH": str(root), "PATH": os.environ["PATH"]}
        text = subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd="/").stdout
        found = dict(re.findall(r"^  (\S+)  (\S+)$", text, re.MULTILINE))
        conf = {"spark.archives": found["spark.archives"]}
        with session("local-cluster[2,1,1024]", found["PYSPARK_PYTHON"], conf) as spark:
            yield spark


@contextmanager
def with_gpus() -> Iterator[Any]:
    """An executor of two tasks that says it has four GPUs, by index, by name, and one of them a MIG device."""
    with tempfile.TemporaryDirectory(prefix="lagom-gpus-") as folder:
        script = Path(folder, "gpus.sh")
        addresses = ["0", "1", "GPU-3c2b", "MIG-77aa"]
        script.write_text(f"#!/bin/sh\necho '{json.dumps({'name': 'gpu', 'addresses': addresses})}'\n")
        script.chmod(0o755)
        amounts = {"worker": "4", "executor": "4", "task": "2"}
        conf = {f"spark.{owner}.resource.gpu.amount": amount for owner, amount in amounts.items()}
        conf |= {f"spark.{owner}.resource.gpu.discoveryScript": str(script) for owner in ("worker", "executor")}
        with session("local-cluster[1,2,1024]", conf=conf) as spark:
            yield spark


@contextmanager
def session(master: str, python: str = sys.executable, conf: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A classic session with a JVM of its own."""
    from pyspark.sql import SparkSession

    with _environment(PYSPARK_PYTHON=python, TMPDIR=scratch()):
        builder = SparkSession.builder.master(master).appName("lagom tests")
        for key, value in (_CONF | dict(conf or {})).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()
        _end_jvm()
        # PySpark leaves a handler of Ctrl-C here, which fails without a session.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def spark_master(address: str = "127.0.0.1", options: str = "") -> Iterator[str]:
    """A standalone cluster's master; gives its URL."""
    args = ["spark-class", "org.apache.spark.deploy.master.Master", "--host", address, "--port", "0"]
    ready = rf"Starting Spark master at (spark://{address}:\d+)"
    with daemon([*args, "--webui-port", "0"], ready, _java(options)) as url:
        yield url


@contextmanager
def spark_worker(
    url: str, cores: int, address: str = "127.0.0.1", prefix: Sequence[str] = (), options: str = ""
) -> Iterator[None]:
    """A worker of that master's; ``prefix`` is a command that runs another one, elsewhere."""
    with tempfile.TemporaryDirectory(prefix="lagom-worker-") as folder:
        work = folder if not prefix else "/tmp/work"
        args = ["spark-class", "org.apache.spark.deploy.worker.Worker", "--host", address, "--webui-port", "0"]
        args += ["-c", str(cores), "-m", "3g", "-d", work, url]
        with daemon(args, "", _java(options), prefix):  # the session's first call waits until it has registered
            yield


def _java(options: str) -> Mapping[str, str]:
    return {"SPARK_DAEMON_JAVA_OPTS": f"{JVM} {options}"}


@contextmanager
def daemon(
    args: Sequence[str],
    ready: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[str]:
    """One of Spark's own programs; gives the group of ``ready``, a pattern of a line that it logs when it is up."""
    import pyspark

    home = Path(pyspark.__file__).parent
    with tempfile.TemporaryDirectory(prefix="lagom-spark-") as folder:
        log = Path(folder, "log")
        command = [*prefix, str(home / "bin" / args[0]), *args[1:]]
        settings = {
            "TMPDIR": scratch(),
            "SPARK_HOME": str(home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JVM,
        }
        # Executors must not inherit what lets this process find the checkout.
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYSPARK_PYTHON")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=kept | settings | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(die_with, os.getpid()),  # also when the tests are killed
                cwd="/",
            )
        try:
            yield _logged(process, log, ready) if ready else ""
        finally:
            _end(process)


@contextmanager
def bare_python(torch: bool = True) -> Iterator[Path]:
    """A virtual environment of its own that reaches torch, pyspark and pyarrow, but not lagom; or not even those."""
    with tempfile.TemporaryDirectory(prefix="lagom-bare-", dir="/var/tmp") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        packages = Path(folder, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
        main = Path(sysconfig.get_paths()["purelib"])
        if torch:
            # .pth files in there, as an editable install has, are not read.
            (packages / "main.pth").write_text(f"{main}\n")
        else:
            for path in main.iterdir():
                if path.name.partition("-")[0] in _SPARK_NEEDS:
                    (packages / path.name).symlink_to(path)
        yield Path(folder, "bin", "python")


_SPARK_NEEDS = {"pyspark", "py4j", "pyarrow", "pandas", "numpy", "numpy.libs", "dateutil", "six.py", "pytz", "tzdata"}


KINDS: Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "local[2]": lambda: local(2),
    "local[4]": lambda: local(4),
    "local-cluster": local_cluster,
    "standalone": standalone,
    "dwindling": standalone,
    "decommissioning": decommissioning,
    "encrypted": lambda: encrypted("local[2]"),
    "encrypted-cluster": lambda: encrypted("local-cluster[2,1,1024]"),
    "connect": connect,
    "foreign": foreign,
    "unplugged": foreign,
    "foreign-encrypted": lambda: foreign(_ENCRYPTION),
    "dynamic": dynamic,
    "elastic": elastic,
    "gpus": with_gpus,
    "packed": packed,
}
"""Kinds of Spark, by the parameter of a test.

One test ends a worker of the "dwindling" one, another cuts off a host of the "unplugged" one.
"""


def archive_classes() -> None:
    """Have a JVM that runs a job write the classes that it has loaded, so that others need not parse and check them."""
    ARCHIVE.unlink(missing_ok=True)
    with (
        _environment(SPARK_SUBMIT_OPTS=f"{_QUICK} -Xlog:disable -XX:ArchiveClassesAtExit={ARCHIVE}"),
        local(2) as spark,
    ):
        spark.range(0, 2, 1, 2).mapInArrow(lambda batches: batches, "id long", barrier=True).collect()


@functools.cache
def scratch() -> str:
    """Folder for the executors' temporary files, apart from those of anything else that runs here."""
    folder = tempfile.mkdtemp(prefix="lagom-scratch-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _logged(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_jvm() -> None:
    """The next session is to have a JVM that has seen no settings of this one."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(120)
    SparkContext._gateway = None
    SparkContext._jvm = None


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def java() -> bool:
    """Whether Spark can start here."""
    return shutil.which("java") is not None or "JAVA_HOME" in os.environ


if __name__ == "__main__":
    archive_classes()
