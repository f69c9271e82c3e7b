"""Streams of random numbers: common streams, equal on all ranks, and own streams, different on each rank."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lagom.random_states import equal_state, random_states, seed_torch, state_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from lagom.exchange.group import Group

DRAWING = threading.RLock()
"""Lock held while the global generators have a rank's own streams, and while a thread draws from a common stream."""
os.register_at_fork(before=DRAWING.acquire, after_in_parent=DRAWING.release, after_in_child=DRAWING.release)


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, ``random`` and, if it is imported, numpy."""
    seed_torch(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(seed)  # the legacy global generator, which programs still use


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that is the same on every machine for equal ``parts``."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


class CommonStreams:
    """Keeps the global generators equal on all ranks: reseeds generators from which ranks drew different amounts."""

    def __init__(self, seed: int | None) -> None:
        """``seed``: the run's seed; with None, torch's initial seed is used."""
        self._seed = seed
        self._noted: dict[str, Any] = {}
        self._num_restarts = 0

    def note(self) -> None:
        """Record the generators' states; called on all ranks before they may draw different amounts."""
        self._noted = random_states()

    def reseed_uneven(self, group: Group, check_place: Callable[[str], None]) -> None:
        """Reseed generators whose states differ between ranks, if some rank has drawn from them since ``note``.

        Equal states stay: the ranks have drawn equally, or the program has seeded the generator. This is a collective
        if ``note`` was called, and does nothing otherwise.

        Args:
            check_place: raises an error on all ranks unless all are at the given place of the program.
        """
        if self._noted:
            before, self._noted = self._noted, {}
            now = random_states()
            mine = [
                (name, not equal_state(state, now[name]), state_digest(now[name])) for name, state in before.items()
            ]
            check_place("a data loader, after a batch whose shares differ in size")
            found: dict[str, list[tuple[bool, str]]] = {}
            for one in group.all_gather_bytes(json.dumps(mine).encode()):
                for name, is_changed, digest in json.loads(one):
                    found.setdefault(name, []).append((is_changed, digest))
            self._restart({name for name, states in found.items() if _differ(states)})

    def _restart(self, names: set[str]) -> None:
        if not names:
            return
        self._num_restarts += 1
        origin = torch.initial_seed() if self._seed is None else self._seed
        seed = derive_seed("common", origin, self._num_restarts)
        if "torch" in names or "cuda" in names:
            seed_torch(seed)
        if "random" in names:
            random.seed(seed)
        if "numpy" in names:
            sys.modules["numpy.random"].seed(seed % 2**32)


def _differ(states: Collection[tuple[bool, str]]) -> bool:
    """Return whether a generator has changed on some rank, and is in different states now."""
    return any(is_changed for is_changed, _ in states) and len({digest for _, digest in states}) > 1


class OwnStreams:
    """Replaces the states of the global generators temporarily by those of this rank's own streams.

    During a forward only torch's generators are replaced, which takes 2 microseconds; during a fetch of samples also
    those of numpy and ``random``.
    """

    def __init__(self, seed: int | None, rank: int, device: torch.device) -> None:
        """``seed``: the run's seed; with None, the common stream's state at the first draw is the seed."""
        self._seed_of_run = seed
        self._rank = rank
        self._torch: Any = None
        self._random: Any = None
        self._numpy: Any = None
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._cuda: Any = None
        self._fetching_thread: int | None = None
        """The thread that draws in ``in_fetch``."""

    @property
    def is_fetching(self) -> bool:
        """Whether this thread fetches samples with the rank's own streams."""
        return self._fetching_thread == threading.get_ident()

    def _seed_streams(self) -> None:
        origin = self._seed_of_run
        if origin is None:
            # The common state is equal on all ranks, and depends on the driver's state at the start of the run.
            origin = derive_seed(bytes(torch.default_generator.get_state().tolist()))
        self._seed = derive_seed("own", origin, self._rank)
        self._torch = torch.Generator().manual_seed(self._seed).get_state()
        self._random = random.Random(self._seed).getstate()

    def in_forward(self) -> _ForwardSwap:
        """Return a context manager in which torch's generators, of CPU and GPU, draw from the rank's own streams."""
        return _ForwardSwap(self)

    @contextmanager
    def in_fetch(self) -> Iterator[None]:
        """Context manager in which torch, numpy and ``random`` draw from the rank's own streams."""
        with DRAWING:
            if self._torch is None:
                self._seed_streams()
            common, outer = random.getstate(), self._fetching_thread
            random.setstate(self._random)
            self._fetching_thread = threading.get_ident()
            try:
                with self.in_forward(), self._swap_numpy():
                    yield
            finally:
                self._fetching_thread = outer
                self._random = random.getstate()
                random.setstate(common)

    def swap(self) -> tuple[torch.Tensor, Any]:
        """Switch torch's generators to the rank's own streams, and acquire ``DRAWING``, which ``swap_back`` releases.

        Return the arguments of ``swap_back``.
        """
        DRAWING.acquire()
        if self._torch is None:
            self._seed_streams()
        generator = torch.default_generator
        common = generator.get_state()
        generator.set_state(self._torch)
        return common, self._swap_device() if self._on_cuda else None

    def swap_back(self, common: torch.Tensor, on_device: Any) -> None:
        """Switch back to the common streams, and release ``DRAWING``; the arguments are the results of ``swap``."""
        generator = torch.default_generator
        self._torch = generator.get_state()
        generator.set_state(common)
        if on_device is not None:
            torch.cuda.default_generators[self._device.index or 0].graphsafe_set_state(on_device)
        DRAWING.release()

    def _swap_device(self) -> Any:
        generator = torch.cuda.default_generators[self._device.index or 0]
        if self._cuda is None:
            self._cuda = torch.Generator(self._device).manual_seed(self._seed)
        # ``graphsafe_set_state`` lets both generators share one state, so draws advance ``self._cuda`` as well.
        common = generator.graphsafe_get_state()
        generator.graphsafe_set_state(self._cuda)
        return common

    @contextmanager
    def _swap_numpy(self) -> Iterator[None]:
        if "numpy.random" not in sys.modules:
            yield
            return
        import numpy as np

        if self._numpy is None:
            self._numpy = np.random.MT19937(self._seed)
        # Replacing the bit generator takes only 0.3 us, but loses the cached second number of a pair of normal numbers.
        kept = np.random.get_state(legacy=False)
        common = np.random.mtrand.get_bit_generator()
        np.random.mtrand.set_bit_generator(self._numpy)
        try:
            yield
        finally:
            np.random.mtrand.set_bit_generator(common)
            if kept["has_gauss"]:
                np.random.set_state(kept)


class _ForwardSwap:
    """Context manager of ``OwnStreams.in_forward``; ``@contextmanager`` would take as long as the swap itself."""

    __slots__ = ("_common", "_streams")

    def __init__(self, streams: OwnStreams) -> None:
        self._streams = streams

    def __enter__(self) -> None:
        self._common = self._streams.swap()

    def __exit__(self, *_: object) -> None:
        self._streams.swap_back(*self._common)
