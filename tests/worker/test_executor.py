"""``lagom.worker.executor`` and ``task``: what goes through Spark, without Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import cloudpickle
import pytest

from lagom.monitor.channel import anonymous_file
from lagom.payload import Parcel, unpack
from lagom.worker import executor, task
from lagom.worker.executor import visible
from lagom.worker.task import failure_in, failure_text, spark_task


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
    text = f"org.apache.spark.SparkException: Job aborted\n\tat {failure_text(report, error)}\n\tat java.lang.Thread"
    assert failure_in(text) == (report, error)


def test_a_text_without_a_failure_has_none() -> None:
    assert failure_in("org.apache.spark.SparkException: Job aborted") is None


def test_an_empty_error_is_kept_as_such() -> None:
    assert failure_in(failure_text("{}", b"")) == ("{}", b"")


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_a_failure_whose_error_was_cut_off_still_has_its_report(cut: int) -> None:
    text = failure_text('{"rank": 1}', os.urandom(1000))
    found = failure_in(text[: len(text) - cut])
    assert found is not None
    assert json.loads(found[0]) == {"rank": 1}


def test_the_failure_of_a_rank_becomes_text_with_the_exception_in_it() -> None:
    fd = anonymous_file("outcome")
    Parcel({"error": KeyError("lr")}).write(fd)
    report = {"rank": 3, "ok": False, "error": "KeyError", "message": "'lr'", "traceback": "x" * 100_000}
    text = executor._as_text(report, fd)
    os.close(fd)
    assert text.startswith("rank 3: KeyError: 'lr'")
    found = failure_in(text)
    assert found is not None
    summary = json.loads(found[0])
    assert summary["rank"] == 3
    assert len(summary["traceback"]) == 20_000
    assert unpack(found[1])["error"].args == ("lr",)


def test_the_task_can_be_unpacked_where_there_is_no_lagom() -> None:
    # As the launcher does.
    cloudpickle.register_pickle_by_value(task)
    try:
        data = cloudpickle.dumps(spark_task(b"zip", b"spec"))
    finally:
        cloudpickle.unregister_pickle_by_value(task)
    code = "import pickle, sys; sys.modules['lagom'] = None; print(pickle.loads(bytes.fromhex(sys.argv[1])).__name__)"
    done = subprocess.run([sys.executable, "-c", code, data.hex()], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("run\n", "")
