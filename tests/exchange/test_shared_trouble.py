"""``lagom.exchange.shared_memory`` where the system, another rank or a fork is in the way."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import signal
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lagom.errors import CollectiveError
from lagom.exchange import shared_memory as handing
from lagom.exchange.native import native
from lagom.session.session import Session
from tests.leaks import shared_memory_files
from tests.ranks import communicator, lagom_log, run_ranks, text_gather

if native() is None:
    pytest.skip("lagom was installed without its compiled part: no compiler, or no Linux", allow_module_level=True)

_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}


def forbid_memfd() -> None:
    """Have memfd_create fail in this thread with EPERM, as the profile of a container may."""
    load, is_equal, give = 0x20, 0x15, 0x06
    program = b"".join(
        struct.pack("HBBI", *one)
        for one in (
            (load, 0, 0, 0),  # the number of the system call
            (is_equal, 0, 1, _MEMFD_CREATE[platform.machine()]),
            (give, 0, 0, 0x00050000 | 1),
            (give, 0, 0, 0x7FFF0000),
        )
    )
    held = ctypes.create_string_buffer(program)
    filters = ctypes.create_string_buffer(struct.pack("H6xP", 4, ctypes.addressof(held)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, filters, 0, 0) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.skipif(platform.machine() not in _MEMFD_CREATE, reason="the number of memfd_create is not known here")
def test_where_memory_files_are_forbidden_a_file_without_a_name_serves() -> None:
    def run(session: Session) -> Any:
        if session.rank == 0:
            forbid_memfd()
        near = communicator(session)
        one = torch.ones(1_000_000)
        near.all_reduce(one.data_ptr(), len(one), 1, 0)
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/#" in line]
        near.barrier()
        return one.sum().item(), ["(deleted)" in line for line in maps], shared_memory_files()

    before = shared_memory_files()
    assert run_ranks(2, run, patches=False) == [(2e6, [True], before)] * 2


def test_a_system_that_does_not_name_its_host_gets_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> str:
        raise FileNotFoundError("boot_id")

    def run(session: Session) -> Any:
        group = session.group
        assert group is not None
        if session.rank == 1:
            monkeypatch.setattr(handing, "home", unknown)
        said = lagom_log(logging.INFO)
        one = torch.ones(2)
        group.all_reduce(one)
        return one.tolist(), said

    first, second = run_ranks(2, run, collectives="auto")
    assert first[0] == second[0] == [2.0, 2.0]
    assert "this system does not say which host it is: boot_id (rank 1)" in first[1][0]


def test_a_rank_that_is_stopped_in_an_exchange_is_named_after_the_timeout() -> None:
    def run(session: Session) -> Any:
        near = communicator(session, 0.5)
        done = communicator(session)
        pids = text_gather(session)(str(os.getpid()).encode())
        one = torch.zeros(3_000_000)
        said = ""
        if session.rank == 0:
            threading.Timer(0.1, os.kill, (int(pids[1]), signal.SIGSTOP)).start()
        try:
            while True:
                near.all_reduce(one.data_ptr(), len(one), 1, 0)
        except RuntimeError as error:
            said = str(error)
        if session.rank == 0:
            os.kill(int(pids[1]), signal.SIGCONT)
        done.barrier()
        return said

    said = set(run_ranks(2, run, patches=False))
    assert said == {"rank 1 did not come to all_reduce of rank 0 within 0.5 s"}


def test_signals_that_keep_coming_make_no_rank_look_dead() -> None:
    def run(session: Session) -> float:
        near = communicator(session)
        num = 0

        def count(*_: object) -> None:
            nonlocal num
            num += 1

        signal.signal(signal.SIGALRM, count)
        near.barrier()
        one = torch.ones(1)
        if session.rank == 1:
            time.sleep(0.6)  # for which rank 0 waits, woken by a signal each time
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0001)
        near.all_reduce(one.data_ptr(), 1, 1, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        near.barrier()
        assert session.rank == 1 or num > 100
        return one.item()

    assert run_ranks(2, run, patches=False) == [2.0, 2.0]


def test_a_fork_while_another_thread_exchanges_is_no_deadlock() -> None:
    def run(session: Session) -> int:
        near = communicator(session)
        other = communicator(session)
        waiting = threading.Thread(target=near.barrier)
        code = 0
        if session.rank == 0:
            waiting.start()
            # The thread may or may not hold the lock when this process forks; the test must pass either way.
            time.sleep(0.05)
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                try:
                    near.barrier()
                except RuntimeError:
                    os._exit(7)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        other.barrier()
        if session.rank == 1:
            near.barrier()
        else:
            waiting.join()
        return code

    assert run_ranks(2, run, patches=False) == [7, 0]


def test_what_is_not_contiguous_is_refused_by_the_group_rather_than_read_past_its_end() -> None:
    def run(session: Session) -> None:
        group = session.group
        assert group is not None
        wide = torch.zeros(1).expand(100)
        for exchange in (group.all_reduce, group.broadcast, group.all_gather):
            with pytest.raises((AssertionError, CollectiveError)):
                exchange(wide)
        group.barrier()

    run_ranks(2, run)
