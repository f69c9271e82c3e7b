"""Measures the driver's time for each trial of a search with hundreds of slots, which are simulated.

    python -m benchmarks.search_scale [--slots 500] [--trials 5000] [--optimizer random]

A stub stands for the slots: it joins at once, and ends each trial after a made-up time, without a process. All else is
the loop of a search, its study and its journal.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import heapq
import itertools
import logging
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lagom.config import HyperparameterOptConfig, Searchspace
from lagom.driver.local import LocalLauncher
from lagom.extensions.search.on_rank.messages import (
    OutcomePart,
    RunTrial,
    SlotJoin,
    TrialEnded,
    TrialReport,
    TrialValue,
)
from lagom.extensions.search.study import Study
from lagom.extensions.search.trial_loop import TrialLoop
from lagom.extensions.search.trial_source import TrialOutcome
from lagom.plan import plan
from lagom.program.payload import Parcel
from lagom.wire.messages import LocalEvent, Message


class StubSlots:
    """Simulated slots with a virtual clock; an event is a message with its time of arrival."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(1)
        self._events: list[tuple[float, int, int, Message]] = []
        self._outcome = base64.b64encode(Parcel({"value": 0.5, "samples": 0}).tobytes()).decode()
        self._now = 0.0
        self._order = itertools.count()
        for slot in range(number):
            place: dict[str, Any] = {"host": f"host-{slot // 8}", "ip": "", "cores": 8, "gpus": [], "store": None}
            join = SlotJoin(task=slot, pid=1, ranks=[0], python="", torch="", sees_driver=True, **place)
            self._add(0.0, slot, join)

    def __enter__(self) -> StubSlots:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def send(self, slot: int, message: Message) -> None:
        """Schedule the messages of a trial: five reports, and its end."""
        if not isinstance(message, RunTrial):
            return
        seconds, value = self._random.uniform(1, 10), self._random.random()
        for step in range(5):
            self._add(seconds * (step + 1) / 6, slot, TrialValue(step=step, value=value + 1 / (step + 1)))
        self._add(seconds, slot, OutcomePart(name="outcome", data=self._outcome))
        report = TrialReport(rank=0, ok=True, metric=value)
        self._add(seconds, slot, TrialEnded(reports=[report], seconds=seconds, problems=[]))

    def serve(self, take: Callable[[int, Message | LocalEvent], None], timeout_s: float) -> None:
        """Advance the virtual clock to the next message, and call ``take`` with it."""
        if self._events:
            self._now, _, slot, message = heapq.heappop(self._events)
            take(slot, message)

    def release(self, slot: int) -> bool:
        """Return False: these slots are nobody else's."""
        return False

    def over(self) -> None:
        """Do nothing."""

    def _add(self, delay_s: float, slot: int, message: Message) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._order), slot, message))


class MarkedStudy(Study):
    """A study that records processor time and memory after every ``every`` trials."""

    marks: list[tuple[int, float, int]]
    every: int

    def tell(self, number: int, outcome: TrialOutcome) -> None:
        """Tell the study how a trial ended; after every ``every`` trials, record the figures."""
        super().tell(number, outcome)
        self.num_told = getattr(self, "num_told", 0) + 1
        if self.num_told % self.every == 0:
            self.marks.append((self.num_told, time.process_time(), _memory()))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the time of a trial by its number; return 0 if the target holds, else 1."""
    args = _arguments(argv)
    logging.getLogger("lagom").setLevel(logging.ERROR)
    space = Searchspace(
        lr=("DOUBLE", [1e-5, 1e-1], "log"), units=("INTEGER", [32, 512]), act=("CATEGORICAL", ["a", "b"])
    )
    config: Any = HyperparameterOptConfig(
        searchspace=space, num_trials=args.trials, optimizer=args.optimizer, es_policy=args.es_policy, seed=1
    )
    of_trial = dataclasses.replace(plan(config.of_a_trial(), LocalLauncher().cluster()), searches=True)
    with tempfile.TemporaryDirectory() as folder:
        study = MarkedStudy(config, Path(folder))
        study.every, study.marks = args.trials // 5, [(0, time.process_time(), _memory())]
        TrialLoop(study, of_trial, "Metric", None, Path(folder) / "trials").run(StubSlots(args.slots))
        study.close()
    for (first, began, before), (last, end, after) in pairwise(study.marks):
        each, memory = (end - began) / (last - first) * 1e3, (after - before) / (last - first)
        print(f"trials {first:5}-{last:5}: {each:6.2f} ms of processor time each, {memory:6.1f} KB of memory")
    each = (study.marks[-1][1] - study.marks[0][1]) / args.trials * 1e3
    held = each <= 10
    print(f"{'holds' if held else 'MISSED':7}at most 10 ms of the driver's time for each trial: {each:.2f} ms")
    return 0 if held else 1


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--optimizer", default="random")
    parser.add_argument("--es-policy", default="none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
