"""``lagom doctor`` on clusters: one in order, one whose hosts are cut off from each other, one without torch."""

from __future__ import annotations

import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lagom import cli
from lagom.config import TorchDistributedConfig
from lagom.extensions.observe.doctor.findings import Finding
from lagom.extensions.observe.doctor.visit import print_findings, visit
from tests.installed import install
from tests.integration import clusters


def on(*kinds: str) -> pytest.MarkDecorator:
    """Runs a test on these kinds of Spark."""
    return pytest.mark.parametrize("spark", kinds, indirect=True, scope="session")


def found_on(world_size: int) -> dict[str, Finding]:
    """Return the findings of ``visit``, by subject."""
    found = visit(TorchDistributedConfig(launcher="spark", world_size=world_size))
    print(print_findings(found))
    return {one.what: one for one in found}


@pytest.mark.soak  # tests/extensions/observe/doctor has its findings by default
@on("local[2]", "standalone")
def test_a_cluster_in_order_passes(spark: Any) -> None:
    found = found_on(2)
    assert {one.level for one in found.values()} <= {"pass", "warn"}, found
    assert found["executors"].found.startswith("2 tasks on 1 host: Python 3.")
    assert found["launch"].found.startswith("2 ranks ran and came back in")
    assert found["driver"].found == "all ranks reach it"


@on("local[2]")
def test_the_packages_that_a_script_imports_are_looked_for_on_executors(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "site-packages", "lacking-a", "1.5", {"lacking_a.py": ""})
    install(tmp_path / "site-packages", "newer-b", "2.0", {"newer_b.py": ""})
    (tmp_path / "train.py").write_text("import lacking_a, newer_b, numpy\nraise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    with clusters.bare_python() as python:
        (there,) = python.parents[1].glob("lib/python*/site-packages")
        install(there, "newer-b", "1.0", {"newer_b.py": ""})
        monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
        monkeypatch.setattr("lagom.extensions.observe.observe_commands.start_session", lambda *_: spark)
        assert cli.main(["doctor", "--master", "local[2]", "-n", "2", "--json", str(tmp_path / "train.py")]) == 1
    found = [one for one in json.loads(capsys.readouterr().out) if one["what"] == "packages"]
    assert [(one["level"], one["found"]) for one in found] == [
        ("fail", f"lacking-a 1.5 is not on {platform.node()}"),
        ("warn", f"newer-b 2.0 on the driver, 1.0 on {platform.node()}"),
    ]


@pytest.mark.soak  # a minute of time limits
@on("foreign")
def test_hosts_that_are_cut_off_from_each_other_are_named_before_anything_waits_for_them(spark: Any) -> None:
    found = found_on(3)
    assert found["executors"].found.startswith("3 tasks on 2 hosts: ")
    assert "2 hosts reach each other" in found["network"].found
    subnet = spark.conf.get("spark.driver.host").removesuffix(".1")
    one, other = (f"lgh{subnet.split('.')[-1]}n{number}" for number in range(2))
    address = f"{subnet}.11"  # of the other
    subprocess.run(["ip", "-n", one, "route", "add", "prohibit", address], check=True)
    try:
        found = found_on(3)
    finally:
        subprocess.run(["ip", "-n", one, "route", "del", "prohibit", address], check=True)
    network = found["network"]
    assert network.level == "fail"
    assert f"{one} does not reach {other} at {address}:" in network.found
    assert "GLOO_SOCKET_IFNAME" in network.remedy
    assert "launch" not in found  # a run would have waited for a minute


@pytest.mark.soak  # tests/integration/test_special.py has such executors
@on("local[2]")
@pytest.mark.usefixtures("torchless")
def test_executors_without_torch_are_a_line_and_not_a_traceback(spark: Any) -> None:
    found = found_on(1)
    assert (found["torch"].level, list(found)[-1]) == ("fail", "torch")
    assert "there is none for /var/tmp/" in found["torch"].found
