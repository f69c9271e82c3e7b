"""Processes of ranks: forked for one run, or kept for the runs of a file of tests.

A fork, and the first use of torch in it, take longer than a small program, which is why ranks are kept. One on which a
program fails or leaves something behind ends with the others of its run; the next run has new ones.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import multiprocessing
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from lagom.program.pickler import Pickler
from tests import leaks

_CONTEXT = multiprocessing.get_context("fork")
TIMEOUT_S = 120.0
Answer = Callable[[int, Any], tuple[bytes, bool]]
"""Runs a job on the rank of this number; returns what to send back, and whether the rank can go on."""


class RankFailedError(AssertionError):
    """A rank raised; the text is its traceback."""


def on_new_ranks(world_size: int, answer: Callable[[int], tuple[bytes, bool]]) -> list[Any]:
    """Fork ranks that each send what ``answer(rank)`` returns; return the results in rank order."""
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_answer_once, args=(rank, answer, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes)
    finally:
        for process in processes:
            process.join(timeout=2)
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


class WarmRanks:
    """Processes that run one job after another, each on all of them."""

    def __init__(self, world_size: int, answer: Answer) -> None:
        self.pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_stay, args=(rank, answer, theirs, [*self.pipes, ours]))
            process.start()
            theirs.close()
            leaks.STAYING.add(process.pid)
            self.pipes.append(ours)
            self._processes.append(process)

    def begin(self, job: bytes) -> None:
        """Have every rank run ``job``; each sends its answer through its pipe, and then whether it is as it was."""
        for pipe in self.pipes:
            pipe.send_bytes(job)

    def are_as_before(self) -> bool:
        """Whether the job, whose answers have been read, has left nothing behind."""
        try:
            return all(pipe.recv_bytes() == b"as before" for pipe in self.pipes)
        except (EOFError, OSError):
            return False

    def end(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
            leaks.STAYING.discard(process.pid)
            process.close()


class WarmPool:
    """Ranks that stay, by their number."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._kept: dict[int, WarmRanks] = {}

    def run(self, world_size: int, job: bytes) -> list[Any]:
        """Run ``job`` on ranks that are there or else made; return the results in rank order."""
        ranks = self._kept.pop(world_size, None) or WarmRanks(world_size, self._answer)
        stay = False
        try:
            ranks.begin(job)
            results = _collect(ranks.pipes)
            stay = ranks.are_as_before()
            return results
        finally:
            if stay:
                self._kept[world_size] = ranks
            else:
                ranks.end()

    def end(self) -> None:
        """End all ranks."""
        while self._kept:
            self._kept.popitem()[1].end()


def packed(job: object) -> bytes | None:
    """Return ``job`` with the environment it is to run in; None if it can only be inherited by a fork."""
    try:
        stream = io.BytesIO()
        Pickler(stream, lambda _: True, {}).dump((job, dict(os.environ), os.getcwd()))
        return stream.getvalue()
    except Exception:  # whatever the closure of a test holds
        return None


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[bool, int, str]] = []
    deadline = time.monotonic() + TIMEOUT_S
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(waiting.values())} did not end within {TIMEOUT_S:.0f} s; {failures}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                kind, value = "failed", (False, "it died")
            if kind == "failed":
                failures.append((value[0], rank, value[1]))
                deadline = min(deadline, time.monotonic() + 5)
            else:
                results[rank] = value
    if failures:
        _, rank, text = min(failures)
        raise RankFailedError(f"rank {rank} failed:\n{text}")
    return [results[rank] for rank in range(len(pipes))]


def _answer_once(rank: int, answer: Callable[[int], tuple[bytes, bool]], pipe: Connection) -> None:
    pipe.send_bytes(answer(rank)[0])
    pipe.close()
    os._exit(0)


def _stay(rank: int, answer: Answer, pipe: Connection, others: list[Connection]) -> None:
    for other in others:
        other.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            _run(rank, answer, pipe)
    os._exit(0)


def _run(rank: int, answer: Answer, pipe: Connection) -> None:
    job, environment, folder = pickle.loads(pipe.recv_bytes())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    leaks.seed_generators()
    before = leaks.state()
    with _settings_restored():
        text, goes_on = answer(rank, job)
    del job
    pipe.send_bytes(text)
    if not goes_on:
        os._exit(0)  # others that wait for this rank learn of it
    gc.collect()
    gc.freeze()  # so that the next collection has little to look at
    pipe.send_bytes(b"changed" if leaks.leaked(before, 0.0) else b"as before")


@contextlib.contextmanager
def _settings_restored() -> Iterator[None]:
    log = logging.getLogger("lagom")
    handlers, level, dtype = list(log.handlers), log.level, torch.get_default_dtype()
    with warnings.catch_warnings():
        yield
    log.handlers[:] = handlers
    log.setLevel(level)
    torch.set_default_dtype(dtype)
