"""``DividedFetcher``: without workers, each rank loads its part of a batch's samples. See Note [Divided loading]."""

from __future__ import annotations

import math
import statistics
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.weak import WeakIdKeyDictionary

from lagom.batches.sharing.equal_batches import BatchComparison, have_equal_elements
from lagom.batches.sharing.loader_trial import NEVER, ON_TRIAL, SHARED, functions_of, owner_of
from lagom.batches.sharing.loading_state import Generators, LoadingState, is_constant
from lagom.batches.sharing.loading_watch import LoadingWatch, can_watch, watched_exchanges, watched_loading
from lagom.batches.sharing.sample_exchange import SampleExchange
from lagom.disk.install import knows_rank
from lagom.errors import LagomError, PayloadError
from lagom.inspection.reads import describe
from lagom.inspection.state_parts import RestoreError
from lagom.patching.object_reference import ObjectReference
from lagom.random_states import equal_random_states, random_states, set_random_states
from lagom.run_state.random_words import count_words, skip_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils.data import DataLoader

    from lagom.run_state.loader_pass import LoaderPass
    from lagom.session.session import Session

_MOST_TAKEN_BACK = 3
"""Number of batches that are taken back before every rank loads all samples again."""
GAIN = 1.5
"""How many times as long as an exchange the samples of other ranks must take to load."""
_FELT_S = 5e-3
"""Seconds of a batch's loading from which on a line says why it is not divided."""
_LEAST_DIVIDED = 8
"""Number of divided batches after which looks that take too long count against dividing."""
_TIMES = 3
"""Number of exchanges that are timed."""
SEARCH_SHARE = 0.02
"""Largest share of the time of loading in which large containers and arrays are looked at."""


@dataclass(eq=False)
class LoadingFinding:
    """Facts about the loading of one data set with one ``collate_fn``; the choice is equal on all ranks."""

    exchange: SampleExchange
    choice: int = ON_TRIAL
    num_batches: int = 0
    """Number of batches that every rank has loaded whole on trial."""
    words: dict[str, int] | None = None
    """How many words each global generator draws for a sample."""
    num_taken_back: int = 0
    search_s: float = 0.0
    """Seconds that a look at everything that loading could change took."""
    num_divided: int = 0
    looked_s: float = 0.0
    """Seconds of this rank's looks at what loading could change, in all divided batches."""
    loaded_s: float = 0.0
    """Seconds in which this rank has loaded samples in all divided batches."""


class Findings:
    """Remembers what is known of each data set's loading."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary(ref_type=ObjectReference)

    def find(self, session: Session, loader: DataLoader[Any]) -> LoadingFinding:
        """Return the finding for the data set and functions of ``loader``, a new one if there is none."""
        of_owner = self._known.setdefault(owner_of(loader), {})
        functions = functions_of(loader)
        if functions not in of_owner:
            of_owner[functions] = LoadingFinding(SampleExchange(session))
        found: LoadingFinding = of_owner[functions]
        return found


def can_divide(session: Session, fetcher: Any, current: LoaderPass) -> bool:
    """Return whether all ranks see the same batches, fetched sample by sample; the answer is equal on all ranks."""
    config = session.config
    if config.share_loading is False or current.own or current.is_split or not session.may_meet:
        return False
    if (config.batches != "whole") if current.training else (config.evaluation != "gathered"):
        return False
    if type(fetcher) is not _MapDatasetFetcher or not fetcher.auto_collation or knows_rank():
        return False
    return _loads_one_by_one(fetcher.dataset)


def _loads_one_by_one(dataset: Any) -> bool:
    """Return whether a batch's samples are loaded by ``__getitem__``, and not many by one call."""
    while type(dataset) is Subset and "__getitems__" not in vars(dataset):
        dataset = dataset.dataset
    return type(dataset) is ConcatDataset or not callable(getattr(type(dataset), "__getitems__", None))


class DividedFetcher:
    """A loader's fetcher that loads this rank's part of a batch, and takes the other samples from the other ranks.

    Args:
        fetcher: torch's own.
        whole: the fetcher that loads whole batches on every rank.
    """

    def __init__(
        self, fetcher: Any, whole: Any, session: Session, finding: LoadingFinding, current: LoaderPass
    ) -> None:
        self._fetcher, self._whole, self._session = fetcher, whole, session
        self._finding, self._pass = finding, current
        self._tell_clock()
        self._forced = session.config.share_loading is True
        self._state: LoadingState | None = None
        self._loaded_s = math.inf  # the first batch that is divided is searched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def fetch(self, index: Any) -> Any:
        """Return the batch of the samples with the indices ``index``; a collective, if loading is divided or on trial.

        Raises:
            DivergenceError: on all ranks, if one is at another place of the program.
            LagomError: if loading has left a trace that cannot be undone.
        """
        session, finding = self._session, self._finding
        may = finding.choice != NEVER and session.may_meet and not knows_rank()
        may = may and type(index) is list and all(map(_is_fixed, index))
        if not may or len(index) < session.world_size:
            return self._whole.fetch(index)
        if finding.choice == SHARED:
            return self._divide(index)
        finding.num_batches += 1
        return self._whole.fetch(index) if finding.num_batches == 1 else self._examine(index)

    def _examine(self, index: list[Any]) -> Any:
        """Load a whole batch on every rank, look for traces, and find out whether dividing would pay."""
        state = None if self._forced else LoadingState((self._fetcher.dataset,))
        generators = None if self._forced else Generators()
        with self._watched(stops=False) as watch:
            samples, words, seconds = self._load_singly(index)
        start = perf_counter()
        reason = _trace(state, watch, generators)
        self._finding.search_s = perf_counter() - start
        if words is None:
            reason = "its samples draw different numbers of random numbers, or seed a generator"
        elif not reason and self._hands_out(state, samples):
            reason = "its samples are objects that it holds"
        reasons, cost = self._rehearse(samples, reason, words or {})
        verdicts = self._finding.exchange.gather((reasons, seconds, cost), [], own_memory=False)
        reasons = [reason for (found, _, _), _ in verdicts for reason in found if reason]
        seconds = sum(one for (_, one, _), _ in verdicts) / len(verdicts)
        cost = max(one for (_, _, one), _ in verdicts)
        pays = self._forced or seconds * (1 - 1 / len(verdicts)) > GAIN * cost
        self._finding.words = words
        self._finding.choice = NEVER if reasons or not pays else SHARED
        self._tell_clock()
        if reasons and pays and seconds > _FELT_S:
            self._tell(reasons[0])
        return self._fetcher.collate_fn(samples)

    def _load_singly(self, index: list[Any]) -> tuple[list[Any], dict[str, int] | None, float]:
        """Return samples, the words that each of them draws, if all draw as many, and the seconds of loading."""
        samples, times, words, is_even = list[Any](), list[float](), None, True
        for one in index:
            before = random_states()
            start = perf_counter()
            samples += self.load([one])
            times.append(perf_counter() - start)
            if not is_even:
                continue
            after = random_states()
            if words is None:
                words = count_words(before, after)
                is_even = words is not None
            else:
                is_even = equal_random_states(skip_words(before, words, 1), after)
        # The median leaves out samples during which another process had the processor.
        return samples, words if is_even else None, statistics.median(times) * len(times)

    def _rehearse(self, samples: list[Any], reason: str, words: dict[str, int]) -> tuple[list[str], float]:
        """Exchange samples that every rank has, and compare.

        Returns:
            What speaks against dividing on any rank, and the seconds of an exchange and of skipping ``words``.
        """
        exchange, own_memory = self._finding.exchange, not self._copies
        part = samples[slice(*self._bounds(len(samples))[self._session.rank])]
        try:
            verdicts_of_ranks = exchange.gather(reason, part, own_memory=own_memory, learns=True)
        except PayloadError as error:
            verdicts_of_ranks = exchange.gather(str(error), [], own_memory=own_memory)
        if reasons := [other for other, _ in verdicts_of_ranks if other]:
            return reasons, 0.0
        is_equal = _SampleComparison().match(samples, [sample for _, part in verdicts_of_ranks for sample in part])
        costs = []
        for _ in range(_TIMES):  # the first ones take longer, as their memory is new
            start = thread_time()  # without waiting for other ranks
            exchange.gather("", part, own_memory=own_memory)
            skip_words(random_states(), words, len(samples))
            costs.append(thread_time() - start)
        cost = min(costs)
        return [] if is_equal else ["its samples are not the same on all ranks, or not after they have travelled"], cost

    def _divide(self, index: list[Any]) -> Any:
        session, finding, words = self._session, self._finding, self._finding.words
        assert words is not None
        bounds = self._bounds(len(index))
        first, end = bounds[session.rank]
        start = perf_counter()
        searches = self._prepare()
        finding.looked_s += perf_counter() - start + (finding.search_s if searches else 0.0)
        before = random_states()
        if words and first:
            set_random_states(skip_words(before, words, first))
        start, part, reason = perf_counter(), list[Any](), ""
        own = random_states() if words else before
        modes = _modes()
        with self._watched(stops=True) as watch:
            try:
                part = self.load(index[first:end])
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also a SystemExit; loading the batch whole raises it on every rank
                reason = f"a sample could not be loaded ({describe(error)})"
        self._loaded_s += perf_counter() - start
        finding.loaded_s += perf_counter() - start
        finding.num_divided += 1
        state = self._state
        reason = reason or _trace(state, watch)
        if not reason and modes != _modes():
            reason = "it changes the default type of tensors, or whether gradients are computed"
        if not reason and self._hands_out(state, part):
            reason = "a sample is an object that the data set holds"
        if not reason and self._looks_too_long():
            reason = "what it could change takes longer to look at than its samples to load"
        if not equal_random_states(skip_words(own, words, end - first), random_states()):
            reason = reason or "a sample has drawn another number of random numbers than earlier ones"
        if searches and state is not None and state.has_changed_far():
            reason = _LATE
        reasons, samples = self._exchange(part, reason)
        if _LATE in reasons:
            raise LagomError(_LATE.format(name=self._name))
        if not reasons:
            set_random_states(skip_words(before, words, len(index)))
            return self._fetcher.collate_fn(samples)
        if watch is not None:
            watch.forget_warnings()
        self._undo(state)
        torch.set_grad_enabled(modes[0])
        torch.set_default_dtype(modes[1])
        set_random_states(before)
        finding.num_taken_back += 1
        if finding.num_taken_back >= _MOST_TAKEN_BACK:
            finding.choice = NEVER
            self._tell_clock()
            self._tell(reasons[0])
        with self._watched(stops=False) as again:
            batch = self._whole.fetch(index)
        if watch is not None and again is not None:
            watch.show_rest(again)
        return batch

    def _looks_too_long(self) -> bool:
        """Return whether looks take more time than dividing saves, as if a program takes one batch of each pass."""
        finding = self._finding
        saved_s = finding.loaded_s * (self._session.world_size - 1)
        return finding.num_divided > _LEAST_DIVIDED and finding.looked_s * GAIN > saved_s

    def _undo(self, state: LoadingState | None) -> None:
        """Undo the changes that a batch's loading has made; a collective.

        Raises:
            LagomError: on all ranks, if one of them cannot.
        """
        failure = ""
        try:
            if state is not None:
                state.restore()
                # The program may have changed these since they were looked at, which nobody can tell apart.
                failure = "large containers or arrays have changed too" if state.has_changed_far() else ""
        except RestoreError as error:
            failure = str(error)
        for other, _ in self._finding.exchange.gather(failure, [], own_memory=False):
            if other:
                raise LagomError(_NOT_UNDONE.format(name=self._name, error=other))

    def _watched(self, *, stops: bool) -> AbstractContextManager[LoadingWatch | None]:
        if self._forced:
            return watched_exchanges(stops=stops)
        return watched_loading(stops=stops) if can_watch() else nullcontext()

    def _hands_out(self, state: LoadingState | None, samples: Sequence[Any]) -> bool:
        """Return whether a batch may hold objects of the data set's own, which the program may change."""
        return state is not None and not self._copies and any(map(state.holds, samples))

    def _prepare(self) -> bool:
        """Note what loading could change; return whether this batch's loading is searched for any change."""
        if self._forced:
            return False
        searches = self._loaded_s * SEARCH_SHARE >= self._finding.search_s
        if searches:
            self._loaded_s = 0.0
        if self._state is None or self._state.has_changed():  # by the program itself, between batches
            self._state = LoadingState((self._fetcher.dataset,))
        elif searches:
            self._state.copy()
        return searches

    def _exchange(self, part: list[Any], reason: str) -> tuple[list[str], list[Any]]:
        exchange, own_memory = self._finding.exchange, not self._copies
        try:
            found = exchange.gather(reason, [] if reason else part, own_memory=own_memory)
        except PayloadError as error:
            found = exchange.gather(str(error), [], own_memory=own_memory)
        return [other for other, _ in found if other], [sample for _, some in found for sample in some]

    def load(self, index: list[Any]) -> list[Any]:
        """Return the samples with the indices ``index``, loaded by this rank."""
        dataset = self._fetcher.dataset
        if getattr(dataset, "__getitems__", None):
            found: list[Any] = dataset.__getitems__(index)
            return found
        return [dataset[one] for one in index]

    def _bounds(self, count: int) -> list[tuple[int, int]]:
        """Return the first and the last place, plus one, of each rank's samples among ``count``."""
        size = self._session.world_size
        return [(count * rank // size, count * (rank + 1) // size) for rank in range(size)]

    @property
    def _copies(self) -> bool:
        """Whether a batch surely shares no memory with its samples."""
        # A program may add functions to the table, and these may return samples as they are.
        modules = [getattr(one, "__module__", "") for one in default_collate_fn_map.values()]
        is_known = all(name.partition(".")[0] in ("torch", "lagom") for name in modules)
        return is_known and self._fetcher.collate_fn is default_collate

    @property
    def _name(self) -> str:
        return type(self._fetcher.dataset).__name__

    def _tell_clock(self) -> None:
        """Let the time of the next batch's loading count as divided, or as repeated on every rank."""
        self._pass.loading = "divided" if self._finding.choice == SHARED else "repeated"

    def _tell(self, reason: str) -> None:
        name = self._name
        why = (
            f"{name} {reason[3:]}" if reason.startswith("it ") else reason.replace("its samples", f"samples of {name}")
        )
        # A trace may not matter to the program; what prevents dividing by share_loading=True too has another remedy.
        is_trace = reason.startswith("it ") and not reason.startswith(_NEVER_DIVIDED)
        remedy = "share_loading=True divides them if that does not matter; " * is_trace + _WORKERS
        self._session.progress.loading_reason = f"{why}: {remedy}"
        self._session.say_once(_WHOLE.format(name=name, why=why, remedy=remedy), is_notice=True)


def _modes() -> tuple[bool, torch.dtype]:
    return torch.is_grad_enabled(), torch.get_default_dtype()


def _is_fixed(index: Any) -> bool:
    """Return whether loading cannot change ``index``."""
    return all(map(_is_fixed, index)) if type(index) is tuple else is_constant(type(index)) or type(index) is Tensor


def _trace(state: LoadingState | None, watch: LoadingWatch | None, generators: Generators | None = None) -> str:
    """Return the trace that loading has left, in words; empty if none is seen, or wanted (without ``state``)."""
    if knows_rank():
        return "it asks for its rank"
    if watch is not None and watch.seen:
        return f"it {watch.seen[0]}"
    if state is None:
        return ""
    if watch is None:
        return "standard output is an object that cannot be watched"
    if state.hidden:
        return f"it uses {state.hidden}, which may change unseen"
    if state.has_changed_anywhere() if generators is not None else state.has_changed():
        return "it changes its attributes, or variables, while it loads"
    return "it draws from a generator of its own" if generators is not None and generators.have_drawn() else ""


class _SampleComparison(BatchComparison):
    """Compares samples by their elements; which of their parts share memory is not compared."""

    def _match_tensors(self, mine: Tensor, other: Tensor) -> bool:
        if (mine.dtype, mine.shape, mine.stride()) != (other.dtype, other.shape, other.stride()):
            return False
        flat = (one.contiguous().reshape(-1).view(torch.uint8) for one in (mine, other))
        return mine.is_inference() == other.is_inference() and torch.equal(*flat)

    def _match_arrays(self, mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
        return not mine.dtype.hasobject and have_equal_elements(mine, other)


_NEVER_DIVIDED = ("it asks for its rank", "it calls lagom.")
"""Beginnings of reasons that hold with ``share_loading=True``, too."""
_WORKERS = "num_workers of at least 1 loads them once a host"
_WHOLE = "every rank loads every sample of {name}, which is right but not faster, since {why}. Remedy: {remedy}"
_LATE = (
    "{name} has begun to change large containers or arrays while it loads samples, of which each rank has loaded a "
    "part; some batches may have been others than those of one process. Use share_loading=False"
)
_NOT_UNDONE = (
    "{name} has changed while a rank loaded a part of a batch's samples, and this cannot be undone: {error}. Use "
    "share_loading=False"
)


# Note [Divided loading]
#
# Where all ranks see the same batches, and a loader has no workers, each rank would load every sample. Instead it loads
# the samples of its part of a batch, and ranks exchange them. Each rank then collates the whole batch.
#
# Samples may draw from the three global generators, if each draws equally many words: a rank skips the words of the
# samples before its own and of those behind. Augmentations that draw until a number fits are not divided.
#
# The first batch is loaded by all ranks, so that what is made at first use is there. The second is loaded by all, and
# examined: the words of each sample, traces (below), the samples after an exchange, compared bit by bit with a rank's
# own, and the seconds of loading and of the exchange. All ranks agree on the result. A data set keeps it for later
# passes.


# Note [Traces]
#
# A trace is anything by which the program could see which samples a rank has loaded: a changed attribute, item or
# variable that the data set's code can reach (LoadingState), a draw from a generator of its own, a print, a log entry,
# a warning, a written file, a started program or thread, an exchange with other ranks (LoadingWatch), an exception. In
# a divided batch, prints and changes of files are held back, and each rank compares what it can reach before and after.
# If any rank finds a trace, all ranks undo this batch's loading and load it whole, or raise an error where it cannot be
# undone; after three such batches, all later ones. Items of large containers and large arrays are compared only in some
# batches (the sizes of containers in all), for at most 2% of the time of loading; if they change there, though they did
# not at first, it is an error, since earlier batches may have gone wrong.
#
# Objects of C code that may change unseen (an open file, a database) count as a trace, as do objects without end. Not
# seen are: state that C code keeps outside of the objects that can be reached, a clock, writes by C code on other ranks
# than 0, sys.stdout.buffer.
