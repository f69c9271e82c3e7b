"""``lagom.worker.rank_process``: what a rank says of how it ended; tests/host/test_rank_host.py runs whole ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from lagom.errors import CollectiveError, PayloadError
from lagom.payload import unpack
from lagom.worker.rank_process import _pack_error, _pack_result, die_with


def raised(error: BaseException) -> tuple[dict[str, Any], Any]:
    """The report of a rank on ``error``, and the exception that it sends home."""
    try:
        raise error
    except BaseException as caught:
        parcel, report = _pack_error(caught, 1, {})
    return report, unpack(bytearray(parcel.tobytes()))["error"]


def test_an_exception_is_sent_home_and_told_in_words() -> None:
    report, error = raised(KeyError("lr"))
    assert (report["error"], report["message"], report["consequence"]) == ("KeyError", "'lr'", False)
    assert "raise error" in report["traceback"]
    assert error.args == ("lr",)


def test_a_broken_exchange_is_a_consequence() -> None:
    assert raised(CollectiveError("rank 1 is gone"))[0]["consequence"]


@pytest.mark.parametrize(("code", "told"), [(3, 3), (0, 0), (None, None), ("no data", "no data"), (2.5, "2.5")])
def test_an_exit_is_told_with_its_code(code: Any, told: Any) -> None:
    report, error = raised(SystemExit(code))
    assert report["exit"] == told
    assert error is None


def test_a_message_that_fails_is_no_second_failure() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("mute")

    report, error = raised(MuteError())
    assert "RuntimeError" in report["message"]
    assert type(error).__name__ == "MuteError"


def test_a_message_as_long_as_a_book_is_cut_to_what_a_frame_holds() -> None:
    report, _ = raised(ValueError("x" * 5_000_000))
    assert len(report["message"]) + len(report["traceback"]) < 500_000


def test_a_result_that_cannot_travel_is_an_error_of_its_own() -> None:
    with open(os.devnull, "w") as file:
        parcel, report = _pack_result({"value": {"log": file}, "samples": 3}, 1, {})
    error = unpack(bytearray(parcel.tobytes()))["error"]
    assert not report["ok"]
    assert isinstance(error, PayloadError)
    assert "rank 1 returned a dict" in str(error)
    assert "log" in str(error)


def test_a_result_is_sent_home_with_its_samples() -> None:
    parcel, report = _pack_result({"value": 0.5, "samples": 30}, 1, {})
    assert report["ok"]
    assert unpack(parcel.tobytes()) == {"value": 0.5, "samples": 30}


def forked(function: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def test_a_process_dies_with_its_parent_however_that_dies() -> None:
    read, write = os.pipe()

    def parent() -> None:
        me = os.getpid()

        def child() -> None:
            die_with(me)
            os.write(write, b"%d" % os.getpid())
            time.sleep(60)

        forked(child)
        time.sleep(60)

    pid = forked(parent)
    os.close(write)
    child = int(os.read(read, 100))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    # The pipe ends when the last process that holds it has.
    assert os.read(read, 100) == b""
    os.close(read)
    assert child != pid


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    pid = forked(lambda: die_with(1 << 22))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
