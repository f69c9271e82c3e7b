"""``start_session``: starts Spark on a command line's master; reports an unusable master before Spark waits for it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lagom.errors import LagomError
from lagom.spark.spark_failure import missing_package_text, why_it_failed

REACH_S = 2.5
_MIN_JAVA = 17
"""The oldest Java on which Spark 4 runs; Spark 3.5 also runs on Java 8 and 11."""
_WANTED = (
    "want local, spark (Spark on this machine), local[N], spark://HOST:7077, yarn, k8s://https://HOST:PORT, "
    "or sc://HOST for Spark Connect"
)


def start_session(master: str | None = None) -> Any:
    """Start a session on ``master``, or by Spark's own settings if it is None.

    Unless PYSPARK_PYTHON is set, Spark's workers run the Python of this process.

    Raises:
        ValueError: if ``master`` is not a Spark master.
        LagomError: if nothing listens at ``master``, PySpark or Java is missing, or Spark does not start.
    """
    if master is not None:
        check_reach(master, addresses_of(master))
    check_packages()
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder.appName("lagom")
    if master is not None and master.startswith("sc://"):
        builder = builder.remote(master)
    else:
        _check_java()
        builder = builder.config("spark.ui.showConsoleProgress", False)
        builder = builder if master is None else builder.master(master).config("spark.log.level", "ERROR")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    try:
        return builder.getOrCreate()
    except Exception as error:
        where = f" on {master}" if master else ""
        raise LagomError(f"Spark does not start{where}: {why_it_failed(error)}") from error


def check_packages() -> None:
    """Check that this process has PySpark, and the packages that PySpark imports for lagom's jobs.

    Raises:
        LagomError: if a package is missing or too old.
    """
    try:
        from pyspark.sql.pandas.utils import require_minimum_pandas_version, require_minimum_pyarrow_version

        require_minimum_pandas_version()
        require_minimum_pyarrow_version()
    except ImportError as error:
        raise LagomError(f"{missing_package_text(error)}, or use launcher='local'") from error


def addresses_of(master: str) -> list[tuple[str, int]]:
    """Return the addresses on which ``master`` listens; an empty list if the name has none ("yarn", "local[2]").

    Raises:
        ValueError: if ``master`` is not a Spark master.
    """
    if master == "yarn" or re.fullmatch(r"local(\[(\*|[1-9]\d*)(,\s*\d+)?\])?|local-cluster\[[\d, ]+\]", master):
        return []
    scheme, _, rest = master.partition("://")
    ports = {"spark": None, "sc": 15002, "k8s": 443}
    if scheme not in ports or not rest:
        hint = f"; did you mean spark://{master}?" if re.fullmatch(r"[\w.-]+:\d+", master) else ""
        raise ValueError(f"--master {master!r} is no master of Spark's{hint or '; ' + _WANTED}")
    places = rest.split(",") if scheme == "spark" else [re.split("[/;]", rest.rpartition("://")[2])[0]]
    return [_address(master, place, ports[scheme]) for place in places]


def _address(master: str, place: str, default: int | None) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[\da-fA-F:]+\]|[\w.-]+)(?::(\d+))?", place)
    port = int(found[2]) if found and found[2] else default
    if found is None or port is None or not 0 < port < 1 << 16:
        raise ValueError(
            f"--master {master!r} has {place!r} where host and port are wanted; want as in spark://HOST:7077"
        )
    return found[1].strip("[]"), port


def check_reach(master: str, addresses: list[tuple[str, int]]) -> None:
    """Check that one of the ``addresses`` accepts a connection, and that Spark can find YARN.

    The addresses of Connect and Kubernetes are not checked behind a proxy.

    Raises:
        LagomError: if all addresses refuse connections; if a master spark:// does not answer within ``REACH_S``; or for
            "yarn" without its folder of settings.
    """
    if master == "yarn" and not any(os.environ.get(name) for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR")):
        raise LagomError("Spark finds YARN by HADOOP_CONF_DIR or YARN_CONF_DIR, and neither is set")
    proxies = any(value and re.fullmatch("(grpc|https?|all)_proxy", name.lower()) for name, value in os.environ.items())
    proxied = proxies and master.startswith(("sc://", "k8s://"))
    if not addresses or proxied:
        return
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def dial(address: tuple[str, int]) -> None:
        try:
            socket.create_connection(address, timeout=REACH_S).close()
            answers.put("")
        except TimeoutError:
            pass  # the wait below ends without an answer
        except OSError as error:
            answers.put(str(error.strerror or error).lower())

    for address in addresses:
        threading.Thread(target=dial, args=(address,), daemon=True).start()  # the name lookup may exceed the timeout
    said, deadline = "", time.monotonic() + REACH_S
    with contextlib.suppress(queue.Empty):
        for _ in addresses:
            said = answers.get(timeout=max(0, deadline - time.monotonic()))
            if not said:
                return
    if not said and not master.startswith("spark://"):
        return  # a Connect or Kubernetes server may be slow to answer, or be started by the first request
    why = said or f"no answer within {REACH_S} s"
    raise LagomError(f"nobody listens at {master} ({why}); start a master there, or correct the address")


def _check_java() -> None:
    """Check that there is a Java that Spark can start.

    Raises:
        LagomError: if there is no Java, or it is too old.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # spark-submit has started Java already
        return
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(f"{home}/bin/java" if home else "java")
    remedy = "install Java 17 or newer, or set JAVA_HOME to one; launcher='local' needs none"
    if java is None:
        problem = f"JAVA_HOME is {home!r}, where there is no bin/java" if home else "there is no java on PATH"
        raise LagomError(f"Spark needs Java, and {problem}; {remedy}")
    version = _java_version(Path(java).resolve().parents[1] / "release")
    if version is not None and version < _MIN_JAVA and _pyspark_version() >= 4:
        raise LagomError(f"Spark needs Java {_MIN_JAVA} or newer, and {java} is Java {version}; {remedy}")


def _java_version(release: Path) -> int | None:
    """Return the major version in a ``release`` file of a JDK or JRE; None if there is no file or no version."""
    try:
        found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', release.read_text(), flags=re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _pyspark_version() -> int:
    import pyspark

    return int(pyspark.__version__.partition(".")[0])
