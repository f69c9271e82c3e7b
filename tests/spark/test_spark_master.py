"""``lagom.spark.spark_master``: a master that cannot be, or Java that is not there, is one line at once."""

from __future__ import annotations

import builtins
import json
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lagom import cli
from lagom.errors import LagomError
from lagom.spark import spark_master
from lagom.spark.spark_master import addresses_of, check_packages, start_session


@pytest.mark.parametrize(
    ("master", "addresses"),
    [
        ("local", []),
        ("local[*]", []),
        ("local[4, 2]", []),
        ("local-cluster[2,1,1024]", []),
        ("yarn", []),
        ("spark://a:7077", [("a", 7077)]),
        ("spark://a:7077,b-1.c:7078", [("a", 7077), ("b-1.c", 7078)]),
        ("spark://[::1]:7077", [("::1", 7077)]),
        ("k8s://https://10.0.0.1:6443", [("10.0.0.1", 6443)]),
        ("k8s://https://a", [("a", 443)]),
        ("sc://a", [("a", 15002)]),
        ("sc://a:443/;use_ssl=true;token=x", [("a", 443)]),
    ],
)
def test_masters_of_spark_have_these_addresses(master: str, addresses: list[tuple[str, int]]) -> None:
    assert addresses_of(master) == addresses


@pytest.mark.parametrize(
    ("master", "said"),
    [
        ("foo", "'foo' is no master of Spark's; want local, spark"),
        ("localhost:7077", "did you mean spark://localhost:7077?"),
        ("http://a:8080", "is no master of Spark's"),
        ("local[0]", "is no master of Spark's"),
        ("local[x]", "is no master of Spark's"),
        ("spark://", "is no master of Spark's"),
        ("spark://a", "has 'a' where host and port are wanted"),
        ("spark://a:b", "has 'a:b' where host and port are wanted"),
        ("spark://a:70000", "has 'a:70000' where host and port are wanted"),
        ("spark://a:7077,", "has '' where host and port are wanted"),
    ],
)
def test_what_is_no_master_is_one_line(
    master: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "s.py").write_text("")
    for command in (["run", "--master", master, str(tmp_path / "s.py")], ["doctor", "--master", master]):
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_a_master_at_which_nobody_listens_is_one_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))  # which has none: it does not come as far as Java
    (tmp_path / "s.py").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for master in (f"spark://127.0.0.1:{port}", f"sc://127.0.0.1:{port}", f"k8s://https://127.0.0.1:{port}"):
        said = f"nobody listens at {master} (connection refused); start a master there, or correct the address"
        assert cli.main(["run", "--master", master, str(tmp_path / "s.py")]) == 2
        assert capsys.readouterr().err == f"lagom: {said}\n"
    assert cli.main(["doctor", "--json", "--master", master]) == 1
    assert [(one["level"], one["found"]) for one in json.loads(capsys.readouterr().out)] == [("fail", said)]


def test_one_master_of_several_that_listens_is_enough_and_one_that_is_silent_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dial(address: tuple[str, int], timeout: float) -> Any:
        if address[0] == "standby":
            raise ConnectionRefusedError(111, "Connection refused")
        if address[0] == "silent":
            time.sleep(0.5)
            raise TimeoutError("timed out")
        return socket.socket()

    monkeypatch.setattr(socket, "create_connection", dial)
    monkeypatch.setattr(spark_master, "REACH_S", 0.1)
    spark_master.check_reach("spark://standby:1,good:1", [("standby", 1), ("good", 1)])
    with pytest.raises(LagomError, match=r"nobody listens at spark://silent:1 \(no answer within 0\.1 s\)"):
        spark_master.check_reach("spark://silent:1", [("silent", 1)])
    for master in ("sc://silent:1", "k8s://https://silent:1"):  # these may be far
        spark_master.check_reach(master, [("silent", 1)])
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    spark_master.check_reach("k8s://https://standby:1", [("standby", 1)])
    time.sleep(0.5)


def test_yarn_without_its_configuration_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LagomError, match="HADOOP_CONF_DIR or YARN_CONF_DIR, and neither is set"):
        start_session("yarn")


@pytest.mark.parametrize("kind", ["none", "wrong home", "old"])
def test_java_that_will_not_do_is_told_before_spark_starts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    if kind != "none":
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if kind == "old":
        (tmp_path / "bin" / "java").write_text("")
        (tmp_path / "bin" / "java").chmod(0o755)
        (tmp_path / "release").write_text('IMPLEMENTOR="x"\nJAVA_VERSION="1.8.0_392"\n')
        monkeypatch.setattr("pyspark.__version__", "4.0.0")
    said = {
        "none": "there is no java on PATH",
        "wrong home": f"JAVA_HOME is '{tmp_path}', where there is no bin/java",
        "old": f"Spark needs Java 17 or newer, and {tmp_path}/bin/java is Java 8",
    }[kind]
    with pytest.raises(LagomError) as raised:
        start_session("local[2]")
    assert said in str(raised.value)
    assert "set JAVA_HOME to one; launcher='local' needs none" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("package", "said"), [("pandas", "Pandas >= 2"), ("pyarrow", "PyArrow >= 1")])
def test_a_package_that_pyspark_lacks_in_this_process_is_told_as_such(
    package: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyspark")
    imports = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return imports(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(LagomError) as raised:
        check_packages()
    told = str(raised.value)
    assert told.startswith(f"this process's Python ({sys.executable}) lacks a package: [PACKAGE_NOT_INSTALLED] {said}")
    assert "pip install 'lagom-spark[spark]'" in told
    assert "\n" not in told
    if find_spec("lagom.extensions.observe") is not None:
        from lagom.extensions.observe.doctor.visit import check_this_process

        found = check_this_process("local")
        assert (found.level, found.found[-8:], found.remedy) == ("warn", "no Spark", told)
