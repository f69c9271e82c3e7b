"""``WorkerState``: the random numbers of a loader's worker, and a print of what its data set holds.

``Question`` asks a worker for its state, through the queue of its tasks. See Note [Workers in a snapshot].
"""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.worker import _ResumeIteration, _worker_loop

from lagom.batches.sharing.shared_objects import PLAIN, parts_of, reachable
from lagom.random_states import random_states, set_random_states

_MOST = 1000
"""Largest number of objects that are looked at, those nearest to the data set first."""
_SMALL = 1024
"""Elements up to which a tensor or array is looked at."""
_GLOBAL = (torch.default_generator, getattr(random.random, "__self__"), getattr(np.random.random, "__self__"))  # noqa: B009
_SIZED = (dict, list, tuple, set, frozenset, deque)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """State of a worker between two batches."""

    numbers: bytes
    """States of the generators: the global ones, and those that the data set and functions hold."""
    prints: bytes
    """Text that changes with numbers, texts and sizes of containers in the data set and functions.

    Only the first ``_MOST`` objects, the first items of containers and small tensors are looked at.
    """


@dataclass(frozen=True)
class WorkerAnswer(_ResumeIteration):
    """Answer of a worker: a message of torch's which a worker sends back unchanged."""

    task: int = -1
    state: WorkerState | None = None
    seconds: float = 0.0
    why: str = ""
    """The reason if the worker could not tell or take a state."""


class Question:
    """Asks a worker for its state, after the worker has taken ``state``, if given. Unpickled, it is the answer.

    Args:
        task: the next task of the worker; or -1 - w for worker w in ``ask_workers``.
        state: the state that the worker is to take, if any.
    """

    def __init__(self, task: int, state: WorkerState | None = None) -> None:
        self.task, self._state = task, state

    def __reduce__(self) -> Any:
        return _answer, (self.task, self._state)


def _answer(task: int, state: WorkerState | None) -> WorkerAnswer:
    """Answer a question, in a worker."""
    start = perf_counter()
    try:
        roots = _roots()
        if state is not None:
            _set_numbers(roots, state.numbers)
        found = worker_state(roots)
    except Exception as error:  # would end the worker
        return WorkerAnswer(task=task, why=f"{type(error).__name__}: {error}")
    return WorkerAnswer(task=task, state=found, seconds=perf_counter() - start)


def worker_state(roots: Iterable[object], *, of_process: bool = True) -> WorkerState:
    """Return the state of this process that determines its next batches.

    Args:
        roots: the data set, the collate function and so on; generators and values are searched in these.
        of_process: whether to include the global random generators.
    """
    generators, prints = list[Any](), list[str]()
    for value in reachable(roots, _MOST):
        if _is_generator(value):
            generators.append(value)
        prints.append(_print(value))
    common = random_states() if of_process else {}
    if of_process:
        common["torch"] = common["torch"].numpy().tobytes()
    numbers = pickle.dumps((common, [(type(one).__qualname__, _state_of(one)) for one in generators]))
    return WorkerState(numbers, json.dumps(prints).encode())


def first_difference(before: bytes, now: bytes) -> str:
    """Name the class of the object in which two prints differ first."""
    pairs = zip(json.loads(before), json.loads(now), strict=False)
    return next((one.partition(" ")[0] for one, other in pairs if one != other), "data set")


def _set_numbers(roots: Iterable[object], numbers: bytes) -> None:
    common, states = pickle.loads(numbers)
    common["torch"] = torch.from_numpy(np.frombuffer(common["torch"], np.uint8).copy())
    set_random_states(common)
    generators = [value for value in reachable(roots, _MOST) if _is_generator(value)]
    if [type(one).__qualname__ for one in generators] != [kind for kind, _ in states]:
        raise ValueError("the data set has other generators")
    for generator, (_, state) in zip(generators, states, strict=True):
        _set_state(generator, state)


def _roots() -> list[Any]:
    """Return the data set and the functions of this worker."""
    info = get_worker_info()
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not _worker_loop.__code__:
        frame = frame.f_back
    held = frame.f_locals if frame is not None else {}
    return [info.dataset if info is not None else None, held.get("collate_fn"), held.get("init_fn")]


def _is_generator(value: Any) -> bool:
    """Return whether ``value`` is a random generator of the program's own."""
    numpys = np.random.Generator, np.random.RandomState, np.random.BitGenerator
    return isinstance(value, (torch.Generator, random.Random, *numpys)) and not any(value is one for one in _GLOBAL)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _bits(generator).state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _bits(generator).state = state


def _bits(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _print(value: Any) -> str:
    kind = type(value)
    found = [kind.__qualname__]
    if isinstance(value, torch.Tensor):
        small = value.numel() <= _SMALL and value.layout is torch.strided and value.is_cpu
        found += [str(tuple(value.shape)), repr(value.detach().tolist()) if small else ""]
    elif isinstance(value, np.ndarray):
        small = value.size <= _SMALL and not isinstance(value, np.memmap) and not value.dtype.hasobject
        found += [str(value.shape), repr(value.tolist()) if small else ""]
    elif not _is_generator(value):
        plain = [f"{len(one)} {one[:100]!r}" if isinstance(one, (str, bytes)) else repr(one) for one in _plain(value)]
        found += [str(len(value)) if kind in _SIZED else "", *(sorted(plain) if kind in (set, frozenset) else plain)]
    return " ".join(found)


def _plain(value: Any) -> Iterable[Any]:
    return (one for one in parts_of(value) if type(one) in PLAIN)


# Note [Workers in a snapshot]
#
# A worker's next batch depends on its random numbers, and on what its data set remembers. Rank 0 asks a worker now and
# then, by a message (Question) among its tasks. The worker takes the message from its queue between two batches. When
# the message is unpickled there, it becomes the answer. The class of the answer is derived from torch's
# `_ResumeIteration`, which a worker sends back; with map-style data this does nothing else. Rank 0 keeps the answer,
# and a digest of the batch that the worker made next. A snapshot has the last ones of each worker (WorkerNotes).
#
# To go on, workers are begun with the seeds that they had, and take the random numbers of their last answers, by
# another Question. They make the batches since then again, which are dropped. The first of these is compared by its
# digest. Then the sampler, which has skipped as many batches, gives the tasks that follow (loader_positions.py).
#
# An answer also has a print of the data set: its numbers and texts, and the sizes of its containers, as far as they are
# found. If the print differs from that in the worker's first answer, the data set has a state of its own. Then, or if a
# batch is not as it was, workers begin at the first batch of the pass: there the data set was as the program has it.
# For persistent workers this holds in their first pass only, so from the end of that pass on a data set that changes
# is refused. The program's own copy of the data set must not have changed since workers got it.
