"""``lagom.on_rank.rank_process``: what a rank says of how it ended; tests/host/test_rank_host.py runs whole ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from lagom.on_rank.rank_process import die_with


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
