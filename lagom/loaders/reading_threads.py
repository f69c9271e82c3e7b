"""``Publication``: what rank 0 says in a thread of the program's, for the same thread of the other ranks.

See Note [Loaders in threads].
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lagom.collectives.group import TIMEOUT_S
from lagom.errors import CollectiveError, LagomError
from lagom.patching.object_reference import ObjectReference
from lagom.run_state.random_streams import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from lagom.run_state.loader_pass import LoaderPass
    from lagom.session.session import Session

Result = TypeVar("Result")


class Publication:
    """Bytes that rank 0 publishes in the run's store, one after the other, and every other rank reads.

    Rank 0 waits for nobody; the others wait until it has published.

    Args:
        name: the same on all ranks, and of nothing else.
    """

    def __init__(self, session: Session, name: str) -> None:
        assert session.notes is not None
        self._notes = session.notes
        self._rank = session.rank
        self._num_readers = session.world_size - 1
        self.name = name
        self._count = 0

    def publish(self, data: bytes) -> None:
        """Publish ``data``, on rank 0."""
        self._notes.set(self._next_key(), data.decode("latin-1"))

    def read(self) -> bytes:
        """Read what rank 0 publishes next, on another rank.

        Raises:
            LagomError: when it publishes nothing for as long as ranks wait for each other.
        """
        try:
            return self._notes.receive(self._next_key(), self._num_readers, TIMEOUT_S).encode("latin-1")
        except TimeoutError as error:
            raise LagomError(_NOT_PUBLISHED.format(name=self.name, seconds=TIMEOUT_S)) from error

    def agree(self, mine: bytes) -> bytes:
        """Rank 0's ``mine``, on every rank."""
        if self._rank:
            return self.read()
        self.publish(mine)
        return mine

    def _next_key(self) -> str:
        self._count += 1
        return f"loader/{self.name}/{self._count}"


class PassNames:
    """Names passes over loaders alike on all ranks, those that begin in threads of the program's too."""

    def __init__(self) -> None:
        self._num_in_main = 0
        self._made: dict[str, int] = {}
        self._loaders = WeakIdKeyDictionary(ref_type=ObjectReference)
        self._counts: dict[str, int] = {}
        self._last: dict[str, tuple[weakref.ref[LoaderPass], threading.Thread]] = {}
        self._lock = threading.Lock()

    def made(self, loader: DataLoader[object]) -> None:
        """Number a ``loader`` that the main thread has made, where all ranks make the same ones in the same order."""
        kind = _kind(loader)
        self._made[kind] = self._made.get(kind, 0) + 1
        self._loaders[loader] = f"{kind} {self._made[kind]}"

    def in_main(self) -> str:
        """Name a pass that begins in the main thread, on all ranks."""
        self._num_in_main += 1
        return str(self._num_in_main)

    def in_thread(self, loader: DataLoader[object], current: LoaderPass) -> str:
        """Name the pass ``current`` that begins in another thread.

        Raises:
            LagomError: when another thread is in a pass that cannot be told from this one on other ranks.
        """
        with self._lock:
            name = self._loaders.get(loader) or f"{_kind(loader)} of {_length(loader)}"
            here = threading.current_thread()
            last, thread = self._last.get(name, (None, here))
            other = last() if last is not None else None
            if other is not None and not other.ended and thread is not here and thread.is_alive():
                raise LagomError(_AT_ONCE.format(loader=name))
            self._last[name] = weakref.ref(current), here
            self._counts[name] = self._counts.get(name, 0) + 1
            return f"{name}/{self._counts[name]}"


class Readers:
    """Threads of the program's that read loaders."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left: weakref.WeakKeyDictionary[threading.Thread, torch.Tensor] = weakref.WeakKeyDictionary()
        self._mixed: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def read(self, call: Callable[..., Result], *args: object) -> Result:
        """Call what reads a loader, in this thread."""
        thread = threading.current_thread()
        left = self._left.get(thread)
        if left is not None and not torch.equal(left, torch.default_generator.get_state()):
            self._mixed.add(thread)
        try:
            return call(*args)
        finally:
            self._left[thread] = torch.default_generator.get_state()

    def generator(self, current: LoaderPass) -> torch.Generator | None:
        """Make a generator for a pass that begins in this thread, if others draw from the global one meanwhile.

        Rank 0 decides. In a thread's first pass nobody does, as a rule: the main thread waits for its first batch.
        """
        name = current.publication().name
        seed = derive_seed("thread", torch.initial_seed(), name) if threading.current_thread() in self._mixed else 0
        seed = int(current.publication().agree(str(seed).encode()))
        return torch.Generator().manual_seed(seed) if seed else None

    def excepthook(self) -> Callable[[threading.ExceptHookArgs], None]:
        """Make a ``threading.excepthook`` that ends the run: the main thread would wait for such a thread for ever."""
        original, session = threading.excepthook, self._session

        def hook(args: threading.ExceptHookArgs, /) -> None:
            original(args)
            # Of another rank that is gone its own host process tells; or the program has ended, and this goes on.
            tells = not isinstance(args.exc_value, (SystemExit, CollectiveError))
            read = args.thread in self._left and tells
            if read and session.distributed and session.fail is not None and args.exc_value is not None:
                session.fail(args.exc_value)

        return hook


def _kind(loader: DataLoader[object]) -> str:
    return f"{type(loader).__name__} {type(loader.dataset).__name__} {loader.batch_size} {loader.num_workers}"


def _length(loader: DataLoader[object]) -> int | None:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except Exception:  # a user's data set may have none, or fail to tell it
        return None


_NOT_PUBLISHED = (
    "a thread reads a data loader ({name}) that no thread of rank 0 has read on for {seconds:.0f} s: have all ranks "
    "read the same loaders in threads"
)
_AT_ONCE = (
    "two threads read data loaders at the same time that cannot be told apart on other ranks ({loader}): make one for "
    "each thread, in the main thread and in the same order on all ranks, or call iter() on them in the main thread"
)

# Note [Loaders in threads]
#
# A program may read a loader in a thread of its own, to have batches ready (BackgroundGenerator and its kind). Such a
# thread cannot take part in exchanges: these are in one order, that of the main thread, which is in a backward maybe.
# Nor can it rely on the global generators being equal on all ranks while the main thread draws from them.
#
# So in a thread rank 0 publishes what must be its own: the order of its sampler, the seed of its workers, digests of
# what an iterable data set gives. It waits for nobody. The same thread of another rank waits for that, which is no
# deadlock: rank 0's main thread, with which its own is in step, cannot be past a batch that rank 0 has not drawn.
#
# Programs are exact here that are deterministic in one process: where the main thread waits while a thread draws. Where
# it draws at the same time, as one sees from the second pass of a thread on, torch's samplers get a generator of the
# pass's own: else the main thread of each rank would draw other numbers.
#
# What is published goes by the name of the pass. Passes that begin in the main thread are counted: all ranks begin the
# same ones. For those that begin in a thread it is the loader, by the order in which the main thread made it, and which
# of the loader's passes in threads it is. Two threads in passes of one name could be the other way round on another
# rank, and are an error. The kind of a loader is part of its name, so that one that only rank 0 makes shifts only those
# of its kind.
