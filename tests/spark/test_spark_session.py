"""``lagom.spark.spark_session``: which Spark runs on this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lagom.on_rank.network_interfaces import addresses
from lagom.spark.spark_session import session_facts


class Session:
    """A session of Spark Connect whose server is on ``host``."""

    __module__ = "pyspark.sql.connect.session"

    def __init__(self, host: str | None, master: str) -> None:
        self.conf = SimpleNamespace(get=lambda key, default: master if key == "spark.master" else default)
        self.client: Any = SimpleNamespace() if host is None else SimpleNamespace(host=host)


@pytest.mark.parametrize("host", ["localhost", "127.0.1.1", *addresses().values()])
def test_a_connect_server_of_this_host_is_on_this_machine(host: str) -> None:
    session = Session(host, "local[2]")
    assert session_facts(session).one_machine
    assert not session_facts(Session(host, "spark://m:7077")).one_machine


@pytest.mark.parametrize("host", ["192.0.2.7", None])
def test_a_connect_server_elsewhere_does_not_see_the_files_of_this_machine(host: str | None) -> None:
    session = Session(host, "local[2]")
    assert not session_facts(session).one_machine
