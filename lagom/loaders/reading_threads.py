"""``Publication``: messages of rank 0 from a thread of the program, for the same thread of the other ranks.

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
        name: a unique name, equal on all ranks.
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
        """Return the next message that rank 0 publishes, on another rank.

        Raises:
            LagomError: when rank 0 publishes nothing for as long as ranks wait for each other.
        """
        try:
            return self._notes.receive(self._next_key(), self._num_readers, TIMEOUT_S).encode("latin-1")
        except TimeoutError as error:
            raise LagomError(_NOT_PUBLISHED.format(name=self.name, seconds=TIMEOUT_S)) from error

    def agree(self, mine: bytes) -> bytes:
        """Return rank 0's ``mine``, on every rank."""
        if self._rank:
            return self.read()
        self.publish(mine)
        return mine

    def _next_key(self) -> str:
        self._count += 1
        return f"loader/{self.name}/{self._count}"


class PassNames:
    """Gives passes over loaders names that are equal on all ranks, also passes that begin in threads of the program."""

    def __init__(self) -> None:
        self._num_in_main = 0
        self._made: dict[str, int] = {}
        self._loaders = WeakIdKeyDictionary(ref_type=ObjectReference)
        self._counts: dict[str, int] = {}
        self._last: dict[str, tuple[weakref.ref[LoaderPass], threading.Thread]] = {}
        self._lock = threading.Lock()

    def made(self, loader: DataLoader[object]) -> None:
        """Number a ``loader`` that the main thread has made; all ranks make the same ones in the same order."""
        kind = _kind(loader)
        self._made[kind] = self._made.get(kind, 0) + 1
        self._loaders[loader] = f"{kind} {self._made[kind]}"

    def in_main(self) -> str:
        """Return a name for a pass that begins in the main thread, on all ranks."""
        self._num_in_main += 1
        return str(self._num_in_main)

    def in_thread(self, loader: DataLoader[object], current: LoaderPass) -> str:
        """Return a name for the pass ``current``, which begins in another thread.

        Raises:
            LagomError: when another thread is in a pass that has the same name on other ranks.
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
    """Threads of the program that read loaders."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left: weakref.WeakKeyDictionary[threading.Thread, torch.Tensor] = weakref.WeakKeyDictionary()
        self._mixed: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def read(self, call: Callable[..., Result], *args: object) -> Result:
        """Run ``call``, which reads a loader, in this thread."""
        thread = threading.current_thread()
        left = self._left.get(thread)
        if left is not None and not torch.equal(left, torch.default_generator.get_state()):
            self._mixed.add(thread)
        try:
            return call(*args)
        finally:
            self._left[thread] = torch.default_generator.get_state()

    def generator(self, current: LoaderPass) -> torch.Generator | None:
        """Return a generator for a pass that begins in this thread, if others draw from the global one meanwhile.

        Rank 0 decides. In a thread's first pass usually no other thread draws: the main thread waits for its first
        batch.
        """
        name = current.publication().name
        seed = derive_seed("thread", torch.initial_seed(), name) if threading.current_thread() in self._mixed else 0
        seed = int(current.publication().agree(str(seed).encode()))
        return torch.Generator().manual_seed(seed) if seed else None

    def excepthook(self) -> Callable[[threading.ExceptHookArgs], None]:
        """Return a ``threading.excepthook`` that ends the run: the main thread would wait for the thread for ever."""
        original, session = threading.excepthook, self._session

        def hook(args: threading.ExceptHookArgs, /) -> None:
            original(args)
            # A rank that is gone is reported by its own host process; after the program's end the thread just goes on.
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
    except Exception:  # a user's data set may have no length, or fail to give it
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
# A program may read a loader in a thread of its own, to have batches ready (BackgroundGenerator and similar). Such a
# thread cannot take part in exchanges: these follow one order, that of the main thread, which may be in a backward. Nor
# can it rely on equal global generators on all ranks while the main thread draws from them.
#
# So in a thread, rank 0 publishes its own values where ranks must agree: the order of its sampler, the seed of its
# workers, digests of an iterable data set's samples. It waits for nobody. The same thread of another rank waits for the
# message. This is no deadlock: rank 0's main thread keeps step with the other rank's, and cannot be past a batch that
# rank 0's thread has not drawn.
#
# The results are exact for programs that are deterministic in one process: while a thread draws, the main thread waits.
# If the main thread draws at the same time, as can be seen from a thread's second pass on, torch's samplers get a
# generator of the pass's own: else the main thread of each rank would draw other numbers.
#
# A message is published under the name of its pass. Passes that begin in the main thread are counted: all ranks begin
# the same ones. A pass that begins in a thread is named by its loader (the order in which the main thread made it) and
# by its number among the loader's passes in threads. Two threads in passes of one name could be swapped on another
# rank, and are an error. The kind of a loader is part of its name, so that a loader that only rank 0 makes shifts only
# loaders of its kind.
