"""Streams of random numbers: common streams, equal on all ranks, and own streams, different on each rank.

``equal_fresh_seeds`` gives all ranks the same seed where the program asks the system for a fresh one.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lagom.accelerators import OwnGenerator, is_accelerator
from lagom.errors import DivergenceError
from lagom.patching.importers import Importers, on_import
from lagom.patching.replace import replaced
from lagom.random_states import LIBRARIES, equal_state, random_states, seed_torch, state_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType, ModuleType

    from lagom.exchange.group import Group
    from lagom.session.session import Session

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
        if "torch" in names or names - LIBRARIES:
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
        self._draws_on_device = is_accelerator(device)
        self._on_device: OwnGenerator | None = None
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
        """Return a context manager in which torch's generators, of all devices, draw from the rank's own streams."""
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
        return common, self._swap_device() if self._draws_on_device else None

    def swap_back(self, common: torch.Tensor, on_device: Any) -> None:
        """Switch back to the common streams, and release ``DRAWING``; the arguments are the results of ``swap``."""
        generator = torch.default_generator
        self._torch = generator.get_state()
        generator.set_state(common)
        if self._on_device is not None:
            self._on_device.swap_out(on_device)
        DRAWING.release()

    def _swap_device(self) -> Any:
        if self._on_device is None:
            self._on_device = OwnGenerator(self._device, self._seed)
        return self._on_device.swap_in()

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


_GENERATORS = ("numpy", "random", "torch")
"""Packages whose functions ask for a seed in the name of their caller."""
_SOURCES_OF_BYTES = ("random", "secrets", "uuid")
"""Modules that get bytes from ``os.urandom`` in the name of their caller."""
_NUM_NAMED = 3
"""Most places that an error names."""
_TORCH_SEEDS = 1 << 53
"""Number of seeds from which torch's own ``Generator.seed`` takes one."""
_importers = Importers(random, "seed")


class FreshSeeds:
    """Seeds that are equal on all ranks, and different in each run. See Note [Fresh seeds].

    Args:
        secret: bytes that are equal on all ranks and new in each run.
    """

    def __init__(self, session: Session, streams: OwnStreams, secret: bytes) -> None:
        self._session = session
        self._streams = streams
        self._secret = secret
        self._thread = threading.get_ident()
        self._counts: Counter[str] = Counter()
        self._unequal: dict[str, None] = {}

    def draw(self) -> int | None:
        """Return the next seed, of 128 bits, for the place of the program that asks for one.

        None if the seed shall be fresh on each rank: for the standard library and lagom, in threads, and while samples
        of this rank's share are fetched.
        """
        frame = _asking_frame(_GENERATORS) if self._is_for_all() else None
        if frame is None or _is_of_python_or_lagom(frame):
            return None
        place = _describe(_own_frame(frame))
        self._counts[place] += 1
        text = f"{place} {self._counts[place]}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=16, key=self._secret).digest(), "little")

    def note_unequal(self) -> None:
        """Note the place of the program that asks for bytes that differ between ranks."""
        frame = _asking_frame(_SOURCES_OF_BYTES) if self._is_for_all() else None
        if frame is not None and not _is_of_library(frame):
            self._unequal[_describe(frame)] = None

    def unequal_text(self) -> str:
        """Return a sentence that names the places that got bytes that differ between ranks; "" without any."""
        if not self._unequal:
            return ""
        places, more = list(self._unequal)[:_NUM_NAMED], len(self._unequal) - _NUM_NAMED
        named = ", ".join(places) + (f" and {more} more" if more > 0 else "")
        return (
            f"the program gets random bytes from the system (os.urandom, secrets, uuid) at {named}, which differ "
            "between ranks; if numbers or branches depend on them, take them from random, numpy or torch"
        )

    def _is_for_all(self) -> bool:
        is_main = self._session.live and threading.get_ident() == self._thread
        return is_main and not self._streams.is_fetching


@contextmanager
def equal_fresh_seeds(session: Session, streams: OwnStreams) -> Iterator[None]:
    """Patch the functions of torch, numpy and ``random`` that take a fresh seed from the system.

    A DivergenceError that ends the program gets a sentence about bytes of the system that differ between ranks.
    """
    is_rehearsed = session.plan.rehearsal is not None  # to be compared with a rehearsal on another number of ranks
    seeds = FreshSeeds(
        session, streams, b"rehearsal" if is_rehearsed else session.key[:32] + session.seed_text.encode()
    )
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.Generator, "seed", _torch_seed(seeds)))
        stack.enter_context(replaced(random.Random, "seed", _random_seed(seeds)))
        for module, name in _importers.find():
            stack.enter_context(replaced(module, name, vars(random)["_inst"].seed))
        stack.enter_context(replaced(random, "_urandom", _noted(seeds, vars(random)["_urandom"])))
        stack.enter_context(replaced(os, "urandom", _noted(seeds, os.urandom)))
        numpy = {"numpy.random.bit_generator": lambda module: _change_numpy(stack, seeds, module)}
        stack.enter_context(on_import(numpy))
        try:
            yield
        except DivergenceError as error:
            if (text := seeds.unequal_text()) and len(error.args) == 1:
                error.args = (f"{error.args[0]}; {text}",)
            raise


def _torch_seed(seeds: FreshSeeds) -> Any:
    original: Any = vars(torch.Generator)["seed"]

    def seed(self: torch.Generator) -> int:
        number = seeds.draw()
        if number is None:
            found: int = original(self)
            return found
        return self.manual_seed(number % _TORCH_SEEDS).initial_seed()

    return seed


def _random_seed(seeds: FreshSeeds) -> Any:
    original = vars(random.Random)["seed"]

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        original(self, seeds.draw() if a is None else a, version)

    return seed


def _change_numpy(stack: ExitStack, seeds: FreshSeeds, module: ModuleType) -> None:
    """Replace the function from which ``SeedSequence()``, and so every generator without a seed, has its entropy."""
    original = vars(module)["randbits"]

    def randbits(k: int) -> int:
        number = seeds.draw()
        found: int = original(k) if number is None else number % 2**k
        return found

    stack.enter_context(replaced(module, "randbits", randbits))


def _noted(seeds: FreshSeeds, original: Any) -> Any:
    def urandom(size: int) -> bytes:
        seeds.note_unequal()
        found: bytes = original(size)
        return found

    return urandom


def _asking_frame(passed: tuple[str, ...]) -> FrameType | None:
    """Return the innermost frame outside this file and the packages ``passed``."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename == __file__ or _package(frame) in passed):
        frame = frame.f_back
    return frame


def _own_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame of the program's own code from ``frame`` outwards; ``frame`` if there is none."""
    found: FrameType | None = frame
    while found is not None and _is_of_library(found):
        found = found.f_back
    return frame if found is None else found


def _is_of_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return "site-packages" in path or "dist-packages" in path or _is_of_python_or_lagom(frame)


def _is_of_python_or_lagom(frame: FrameType) -> bool:
    package = _package(frame)
    return package == "lagom" or (package in sys.stdlib_module_names and package != "__main__")


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _describe(frame: FrameType) -> str:
    """Return the place of a frame: its file without the folder, which may differ between hosts, and its line."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


# Note [Fresh seeds]
#
# Without an argument, torch.seed(), random.seed(), numpy.random.default_rng() and others take a seed from the system.
# The generators of ranks would differ from then on. An exchange of rank 0's seed would hang if one rank alone asks. So
# a seed is computed: from a secret that all ranks have and that is new in each run (and in each attempt of a run), from
# the place in the program, and from how often that place has asked. If one rank alone asks at some place, the seeds of
# all other places stay equal.
#
# All of torch's functions call ``Generator.seed``; all of numpy's make a ``SeedSequence``, which calls ``randbits`` of
# its module; ``random.Random()`` calls ``Random.seed``. The main thread of a rank gets equal seeds, also in a forward,
# whose seed may be set again in a backward. Seeds stay different on each rank in threads and loader workers, while a
# rank fetches the samples of its own share, and for the standard library, where ``tempfile`` needs names that differ.
#
# Bytes of ``os.urandom``, ``secrets`` and ``uuid`` stay different too, since they make names and keys. The places that
# ask for them are noted, and a DivergenceError names them.
