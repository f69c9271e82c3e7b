"""horovodrun's command line, as far as ``lagom run`` takes it."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from lagom import cli, experiment
from lagom.config import TorchDistributedConfig
from lagom.extensions.compat.horovodrun import num_ranks, script_of


def test_python_before_the_script_is_left_out() -> None:
    assert script_of(["train.py", "--epochs", "2"]) == (["train.py", "--epochs", "2"], False)
    for python in ("python", "python3", "python3.11", "/usr/bin/python3"):
        assert script_of([python, "-u", "train.py", "python"]) == (["train.py", "python"], True)
    assert script_of(["python_like.py"]) == (["python_like.py"], False)
    assert script_of(["python", "-u", "-m", "train", "-m"]) == (["-m", "train", "-m"], True)
    for words in (["python"], ["python", "-m"], ["python3", "-c", "print()"]):
        with pytest.raises(ValueError, match="want a script, as in"):
            script_of(words)


def test_hosts_are_this_machine_and_have_slots() -> None:
    assert num_ranks(4, None, on_spark=True) == 4
    assert num_ranks(None, None, on_spark=False) is None
    assert num_ranks(4, "localhost:4", on_spark=False) == 4
    assert num_ranks(None, f"localhost:2,{socket.gethostname()}:1", on_spark=False) == 3
    assert num_ranks(1, "127.0.0.1", on_spark=False) == 1
    for hosts, message in (
        ("localhost:2", "-np 4, but -H localhost:2 has 2 slots"),
        ("elsewhere:4", "elsewhere is another machine, .* use --master spark://HOST:PORT"),
        ("localhost:many", "'many' is no number of slots"),
    ):
        with pytest.raises(ValueError, match=message):
            num_ranks(4, hosts, on_spark=False)
    with pytest.raises(ValueError, match="it is Spark that has them"):
        num_ranks(4, "localhost:4", on_spark=True)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("-np 3 -H localhost:4 python SCRIPT -np 9", (3, "all", False)),
        ("-H localhost:4 SCRIPT", (4, "all", False)),
        ("-np 2 python SCRIPT", (2, "all", False)),
        ("--num-proc 2 SCRIPT python", (2, "rank0", False)),
        ("-np 2 --log rank0 --timeline-filename t.json python SCRIPT", (2, "rank0", "t.json")),
    ],
)
def test_a_line_for_horovodrun_is_a_run(
    line: str, wanted: tuple[Any, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.py").write_text("")
    calls = []
    monkeypatch.setattr(experiment, "lagom", lambda script, config: calls.append((script, config)))
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setenv("HOROVOD_TIMELINE", "")
    monkeypatch.setenv("LAGOM_RUN_DIR", str(tmp_path / "runs"))
    words = [str(tmp_path / "s.py") if word == "SCRIPT" else word for word in line.split()]
    assert cli.main(["run", *words]) == 0
    ((script, config),) = calls
    assert isinstance(config, TorchDistributedConfig)
    assert (config.world_size, config.log, config.timeline) == wanted
    assert script.arguments == tuple(words[words.index(str(tmp_path / "s.py")) + 1 :])


def test_what_is_there_is_listed_as_horovodrun_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--check-build"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "[ ] TensorFlow\n    [X] PyTorch\n" in out
    assert "[ ] MPI\n    [X] Gloo\n" in out


def test_wrong_lines_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "-np", "4", "-H", "localhost:2", "python", "x.py"]) == 2
    assert "ask for at most 2" in capsys.readouterr().err
    assert cli.main(["run", "-np", "1", "python", "not_there.py"]) == 2
    assert "there is no script 'not_there.py' here" in capsys.readouterr().err
