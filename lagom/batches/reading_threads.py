"""Loaders that the program reads in its own threads: rank 0 publishes its samplers' order, and other ranks follow it.

See Note [Loaders in threads].
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lagom.errors import CollectiveError, LagomError
from lagom.exchange.group import TIMEOUT_S
from lagom.patching.object_reference import ObjectReference
from lagom.run_state.random_streams import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from lagom.run_state.loader_pass import LoaderPass
    from lagom.session.session import Session

Result = TypeVar("Result")


class Publication:
    """A sequence of messages that rank 0 publishes in the run's store and every other rank reads.

    Rank 0 does not wait; the other ranks wait for each message.

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
        """Publish the next message; for rank 0."""
        self._notes.set(self._next_key(), data.decode("latin-1"))

    def read(self) -> bytes:
        """Wait for rank 0's next message and return it; for other ranks.

        Raises:
            LagomError: if rank 0 publishes nothing for ``TIMEOUT_S`` seconds.
        """
        try:
            return self._notes.receive(self._next_key(), self._num_readers, TIMEOUT_S).encode("latin-1")
        except TimeoutError as error:
            raise LagomError(_NOT_PUBLISHED.format(name=self.name, seconds=TIMEOUT_S)) from error

    def agree(self, mine: bytes) -> bytes:
        """Return rank 0's ``mine`` on every rank: rank 0 publishes, the others read."""
        if self._rank:
            return self.read()
        self.publish(mine)
        return mine

    def _next_key(self) -> str:
        self._count += 1
        return f"loader/{self.name}/{self._count}"


class PassNames:
    """Names loader passes equally on all ranks, also passes that begin in threads of the program."""

    def __init__(self) -> None:
        self._num_in_main = 0
        self._made: dict[str, int] = {}
        self._loaders = WeakIdKeyDictionary(ref_type=ObjectReference)
        self._counts: dict[str, int] = {}
        self._last: dict[str, tuple[weakref.ref[LoaderPass], threading.Thread]] = {}
        self._lock = threading.Lock()

    def number_loader(self, loader: DataLoader[object]) -> None:
        """Number a ``loader`` that the main thread has made; ranks must make loaders of one kind in the same order."""
        kind = _describe_loader(loader)
        self._made[kind] = self._made.get(kind, 0) + 1
        self._loaders[loader] = f"{kind} {self._made[kind]}"

    def name_in_main_thread(self) -> str:
        """Return the next name for a pass that begins in the main thread."""
        self._num_in_main += 1
        return str(self._num_in_main)

    def name_in_thread(self, loader: DataLoader[object], current: LoaderPass) -> str:
        """Return a name, made from the loader's name, for the pass ``current``, which begins in another thread.

        Raises:
            LagomError: if another thread is still in a pass over a loader of that name.
        """
        with self._lock:
            name = self._loaders.get(loader) or f"{_describe_loader(loader)} of {_dataset_length(loader)}"
            here = threading.current_thread()
            last, thread = self._last.get(name, (None, here))
            other = last() if last is not None else None
            if other is not None and not other.ended and thread is not here and thread.is_alive():
                raise LagomError(_SAME_NAME.format(loader=name))
            self._last[name] = weakref.ref(current), here
            self._counts[name] = self._counts.get(name, 0) + 1
            return f"{name}/{self._counts[name]}"


class ReaderThreads:
    """Tracks which threads of the program read loaders, and whether other threads draw random numbers meanwhile."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._left: weakref.WeakKeyDictionary[threading.Thread, torch.Tensor] = weakref.WeakKeyDictionary()
        self._mixed: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def read(self, call: Callable[..., Result], *args: object) -> Result:
        """Run ``call``, which reads a loader; notice draws of other threads since this thread's last call."""
        thread = threading.current_thread()
        left = self._left.get(thread)
        if left is not None and not torch.equal(left, torch.default_generator.get_state()):
            self._mixed.add(thread)
        try:
            return call(*args)
        finally:
            self._left[thread] = torch.default_generator.get_state()

    def make_generator(self, current: LoaderPass) -> torch.Generator | None:
        """Return a new generator for the pass if other threads draw from the global one between reads; else None.

        Rank 0 decides for all ranks. A thread's first pass gets None: usually the main thread waits for the first batch
        of that pass, and draws nothing.

        Raises:
            LagomError: if rank 0's thread does not begin this pass within ``TIMEOUT_S`` seconds.
        """
        name = current.publication().name
        seed = derive_seed("thread", torch.initial_seed(), name) if threading.current_thread() in self._mixed else 0
        seed = int(current.publication().agree(str(seed).encode()))
        return torch.Generator().manual_seed(seed) if seed else None

    def make_excepthook(self) -> Callable[[threading.ExceptHookArgs], None]:
        """Return a ``threading.excepthook`` that fails the run if an exception ends a thread that reads loaders.

        Without this hook the main thread would wait for the thread's batches for ever.
        """
        original, session = threading.excepthook, self._session

        def hook(args: threading.ExceptHookArgs, /) -> None:
            original(args)
            # A lost rank is reported by its own host process, and SystemExit is a normal end of a thread.
            tells = not isinstance(args.exc_value, (SystemExit, CollectiveError))
            read = args.thread in self._left and tells
            if read and session.distributed and session.fail is not None and args.exc_value is not None:
                session.fail(args.exc_value)

        return hook


def _describe_loader(loader: DataLoader[object]) -> str:
    batch_size = getattr(loader, "batch_size", None)  # a library's own loader may have none
    return f"{type(loader).__name__} {type(loader.dataset).__name__} {batch_size} {loader.num_workers}"


def _dataset_length(loader: DataLoader[object]) -> int | None:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except Exception:  # a user's data set may have no length, or its __len__ may fail
        return None


_NOT_PUBLISHED = (
    "a thread reads a data loader ({name}) that no thread of rank 0 has read on for {seconds:.0f} s: have all ranks "
    "read the same loaders in threads"
)
_SAME_NAME = (
    "two threads read data loaders at the same time that cannot be told apart on other ranks ({loader}): make one for "
    "each thread, in the main thread and in the same order on all ranks, or call iter() on them in the main thread"
)

# Note [Loaders in threads]
#
# A program may read a loader in a thread of its own, to prefetch batches (BackgroundGenerator and similar). Such a
# thread cannot take part in collectives: all ranks run these in the order of their main threads, and the main thread
# may be in a backward. Nor are the global random generators equal on all ranks while the main thread draws from them.
#
# So in a thread, rank 0 publishes its own choice wherever ranks must agree: the order of its sampler, the seed of its
# workers, digests of an iterable data set's samples. Rank 0 does not wait. The same thread of another rank waits for
# the message. There is no deadlock: rank 0's main thread stays at the same batch as the other rank's main thread, so
# rank 0's thread reaches every batch that the other rank's thread waits for.
#
# The results equal those of one process for programs that are deterministic in one process: in these the main thread
# waits while the other thread draws. From a thread's second pass on, lagom can see whether the two draw at the same
# time. If they do, torch's samplers get a generator that belongs to the pass. Without it, the main threads of the ranks
# would draw different numbers. A draw during a read is not seen. If a first pass has only a few batches, all draws may
# fall into reads; then ranks notice later that their numbers differ, and the run ends with an error.
#
# A message is published under the name of its pass. Passes that begin in the main thread are numbered, since all ranks
# begin the same passes there. A pass that begins in a thread is named by its loader (kind, and number in the order in
# which the main thread made loaders of this kind; a loader that another thread made has the length of its data set in
# place of the number) and by its number among the loader's passes in threads. If two threads were in passes over
# loaders of one name at once, another rank might exchange the names of the passes; this is an error.
# The kind is part of the name so that a loader that only rank 0 makes shifts only the numbers of its own kind.
