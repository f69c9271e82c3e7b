"""``lagom.spark`` and ``spark_task``: what goes through Spark, without Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import cloudpickle
import pytest

from lagom.program.payload import Parcel, unpack
from lagom.spark import spark_task, task_host
from lagom.spark.spark import task_by_value
from lagom.spark.spark_worker import visible
from lagom.watch.messages import Timeline
from lagom.wire.failure_text import failure_in, failure_text
from lagom.wire.framing import anonymous_file
from lagom.wire.messages import Log, Message, RankReport, to_json


@pytest.mark.parametrize(
    ("address", "mask", "shown"),
    [
        ("0", "", "0"),
        ("3", "", "3"),
        ("1", "4,5", "5"),
        ("0", "GPU-a,GPU-b", "GPU-a"),
        ("1", "MIG-a,MIG-b", "MIG-b"),
        ("4", "4,5", "4"),
        ("5", "4,5", "5"),
        ("GPU-b", "GPU-a,GPU-b", "GPU-b"),
        ("MIG-x", "0,1", "MIG-x"),
        ("GPU-b", "", "GPU-b"),
    ],
)
def test_an_address_of_sparks_is_named_as_cuda_does(address: str, mask: str, shown: str) -> None:
    assert visible(address, mask) == shown


def test_a_failure_survives_as_text_in_the_middle_of_sparks_messages() -> None:
    report = json.dumps({"rank": 1, "message": "ünïcödé : and\nlines"})
    error = os.urandom(1000)
    timeline = json.dumps([to_json(Timeline(rank=1, data="x"))])
    told = failure_text(report, error, timeline)
    text = f"org.apache.spark.SparkException: Job aborted\n\tat {told}\n\tat java.lang.Thread"
    assert failure_in(text) == (report, error, timeline)


def test_a_text_without_a_failure_has_none() -> None:
    assert failure_in("org.apache.spark.SparkException: Job aborted") is None


def test_an_empty_error_is_kept_as_such() -> None:
    assert failure_in(failure_text("{}", b"")) == ("{}", b"", "[]")


@pytest.mark.parametrize(
    ("cut", "has_error"), [(1, True), (10, True), *((cut, False) for cut in range(2100, 2104)), (2600, False)]
)
def test_a_failure_that_was_cut_off_has_what_is_whole(cut: int, has_error: bool) -> None:
    error = os.urandom(1000)
    text = failure_text('{"rank": 1}', error, json.dumps(["x" * 1500]))
    found = failure_in(text[: len(text) - cut])
    assert found is not None
    assert json.loads(found[0]) == {"rank": 1}
    assert found[1:] == (error if has_error else b"", "[]")


def test_of_a_report_that_was_cut_off_there_is_nothing() -> None:
    text = failure_text('{"rank": 1}', os.urandom(1000))
    for length in range(len("lagom-failure:"), len("lagom-failure:") + 16):
        assert failure_in(f"{text[:length]}...\n\tat java.lang.Thread: run") is None


def test_of_several_messages_the_whole_one_counts() -> None:
    error = os.urandom(1000)
    text = failure_text('{"rank": 1}', error, '["x"]')
    assert failure_in("\n".join([text[:30], text[:1000], text, text[:-2]])) == ('{"rank": 1}', error, '["x"]')


def test_of_timelines_the_latest_that_fit_travel_with_a_failure() -> None:
    def said(rank: int, size: int) -> Timeline:
        return Timeline(rank=rank, data=rank * size * "x")

    log = Log(rank=1, stream="stdout", data="words")
    outputs: list[list[Message]] = [[log, said(1, 60_000), said(1, 10), said(1, 20)], [], [said(2, 5000), said(2, 7)]]
    reports = [RankReport(rank=rank, ok=False, output=output) for rank, output in enumerate(outputs)]
    assert task_host.fitting_timelines(reports) == [said(2, 5000), said(1, 10), said(2, 7), said(1, 20)]


def test_the_failure_of_a_rank_becomes_text_with_the_exception_in_it() -> None:
    fd = anonymous_file("outcome")
    Parcel({"error": KeyError("lr")}).write(fd)
    log = Log(rank=3, stream="stdout", data="words")
    report = RankReport(
        rank=3,
        ok=False,
        error="KeyError",
        message="'lr'",
        traceback="x" * 100_000,
        output=[Timeline(rank=3, data=""), log],
    )
    text = task_host.failure_as_text(report, fd, [report])
    os.close(fd)
    assert text.startswith("rank 3: KeyError: 'lr'")
    found = failure_in(text)
    assert found is not None
    summary = json.loads(found[0])
    assert summary["rank"] == 3
    assert summary["output"] == [to_json(log)]
    assert len(summary["traceback"]) == 20_000
    assert unpack(found[1])["error"].args == ("lr",)


def test_the_task_can_be_unpacked_where_there_is_no_lagom() -> None:
    data = cloudpickle.dumps(task_by_value(spark_task.spark_task(b"zip", b"spec")))
    code = "import pickle, sys; sys.modules['lagom'] = None; print(pickle.loads(bytes.fromhex(sys.argv[1])).__name__)"
    done = subprocess.run([sys.executable, "-c", code, data.hex()], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("run\n", "")


def test_pyspark_tells_ranks_the_files_and_the_context_of_their_task() -> None:
    # In processes of their own: pyspark keeps both in classes.
    worker = (
        "import pickle\n"
        "from pyspark import BarrierTaskContext, SparkFiles, TaskContext\n"
        "from lagom.spark.spark_state import SparkState\n"
        "SparkFiles._is_running_on_worker, SparkFiles._root_directory = True, '/added'\n"
        "context = BarrierTaskContext._getOrCreate()\n"
        "context._partitionId = 7\n"
        "TaskContext._setTaskContext(context)\n"
        "print(pickle.dumps(SparkState.of_worker()).hex())\n"
    )
    rank = (
        "import pickle, sys\n"
        "from lagom.patching.importers import on_import\n"
        "with on_import({'pyspark': pickle.loads(bytes.fromhex(sys.argv[1])).restore}):\n"
        "    assert 'pyspark' not in sys.modules\n"
        "    from pyspark import BarrierTaskContext, SparkFiles, TaskContext\n"
        "print(SparkFiles.get('x'), TaskContext.get().partitionId(), type(TaskContext.get()).__name__)\n"
    )
    state = subprocess.run([sys.executable, "-c", worker], capture_output=True, text=True, check=True).stdout
    shown = subprocess.run([sys.executable, "-c", rank, state], capture_output=True, text=True, check=True).stdout
    assert shown == "/added/x 7 BarrierTaskContext\n"
