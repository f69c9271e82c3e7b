"""``Heart``: a rank's thread that tells the host process how far the rank is, and what it does when that is nowhere."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lagom.worker import stacks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lagom.monitor.link import Link, Message
    from lagom.patching.session import Session
    from lagom.plan import Plan


class Heart:
    """Beats every ``hb_interval`` seconds, oftener where stalls are to be found sooner.

    Args:
        control: leads to the host process.
        stacks_fd: file for the stacks of processes that the rank has started.
    """

    def __init__(self, control: Link, plan: Plan, stacks_fd: int | None) -> None:
        self._control = control
        self._stall_s = plan.stall_timeout_s
        self._interval_s = min(plan.hb_interval, plan.stall_timeout_s / 4)
        self._stacks_fd = stacks_fd
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._thread = threading.get_ident()
        self._at: tuple[int, int] | None = None
        self._since = 0.0
        self._last = (0.0, 0.0, 0.0)
        self._begun = (-1.0, 0.0, 0.0)
        self._steps_s = 0.0
        self._children: str | None = None

    def beat_for(self, session: Session) -> None:
        """Begin to beat."""
        self._session = session
        self._last = (time.monotonic(), 0.0, 0.0)
        threading.Thread(target=self._beat, name="lagom-heart", daemon=True).start()

    def last_word(self, report: Message) -> None:
        """Say how far the rank came, and what came of it."""
        with self._lock, contextlib.suppress(OSError):
            if self._session is not None:
                self._control.send(self._progress(self._session))
                for block in _timeline(self._session):
                    self._control.send(block)
            self._control.send(report)

    def _beat(self) -> None:
        assert self._session is not None
        pause = threading.Event()
        while not pause.wait(self._interval_s):
            quiet_s = self._quiet_s(self._session)
            doing = self._doing() if quiet_s >= self._stall_s / 2 else None
            with self._lock:
                try:
                    if doing is not None:
                        self._control.offer(doing)
                    self._control.offer(self._progress(self._session))
                    for block in _timeline(self._session):
                        self._control.offer(block)
                except OSError:
                    return

    def _progress(self, session: Session) -> Message:
        now, progress = time.monotonic(), session.progress()
        samples, data_s = progress["samples"] or 0, progress.pop("data_s") or 0
        before, samples_before, data_before = self._last
        passed = max(now - before, 1e-3)
        self._last = now, samples, data_s
        return {
            "type": "progress",
            **progress,
            "rate": round((samples - samples_before) / passed, 1),
            "steps_s": self._speed(now, progress["epoch"] or 0, progress["step"] or 0),
            "data": round(min(1.0, (data_s - data_before) / passed), 3),
            "memory": memory(session.device.type),
        }

    def _speed(self, now: float, epoch: float, step: float) -> float:
        """Steps a second since this epoch was first told of; at that time, those of the epoch before."""
        if epoch != self._begun[0]:
            self._begun = epoch, now, step
        elif now > self._begun[1] and step > self._begun[2]:
            self._steps_s = round((step - self._begun[2]) / (now - self._begun[1]), 4)
        return self._steps_s

    def _quiet_s(self, session: Session) -> float:
        """Seconds for which the rank has got nowhere."""
        # Of a program that does without the patches it is only known where it stands.
        place = stacks.position(stacks.of_thread(self._thread)) if session.joined else 0
        now = time.monotonic()
        if (session.ticks, place) != self._at:
            session.ticks += session.joined
            self._at, self._since, self._children = (session.ticks, place), now, None
        return now - self._since

    def _doing(self) -> Message:
        found = stacks.doing(stacks.of_thread(self._thread))
        if found["waits"] and self._session is not None:
            words, number, missing = self._session.standing()
            found |= {"exchange": words, "number": number, "missing": missing}
        if self._children is None and self._stacks_fd is not None:
            self._children = "" if found["waits"] else stacks.of_children(self._stacks_fd)
        return {"type": "doing", **found, "children": self._children}


def _timeline(session: Session) -> Iterable[Message]:
    return session.spans.blocks() if session.spans is not None else ()


def memory(device: str) -> int:
    """Bytes that this process holds: on its GPU if it trains there, else of the machine's memory."""
    if device == "cuda":
        import torch

        return torch.cuda.memory_allocated()
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
