"""Loaders without workers: each rank loads a part of each batch, and no program can tell."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

import lagom
from lagom.batches.sharing import divided_fetch
from lagom.batches.sharing.divided_fetch import DividedFetcher
from lagom.patching.replace import replaced
from lagom.random_states import random_states, state_digest
from lagom.session.session import Session
from tests.ranks import alone, lagom_log, run_ranks
from tests.session.loading import Numbers

Pair = namedtuple("Pair", ["picture", "label"])
SETTINGS: dict[str, Any] = {}
"""A global variable that a data set may change."""
COUNTER = [0]
DEALER = random.Random(3)
log = logging.getLogger("pictures")
HELPER: Any = types.ModuleType("helper_of_loading")
"""Stands for a module of the program's, in a file of its own."""
sys.modules[HELPER.__name__] = HELPER
SEEN: list[int] = []
remember = SEEN.append


class Pictures(Numbers):
    """Pictures of 3x8x8 that depend on their index alone."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.scale = 2.0

    def make(self, index: int) -> Any:
        return torch.full((3, 8, 8), float(index)).mul_(self.scale)

    def __getitem__(self, index: int) -> Any:
        return self.make(index), index % 3


class Downloaded(Pictures):
    """Has torchvision's argument, for which lagom wraps the constructor."""

    def __init__(self, download: bool = False) -> None:
        super().__init__()
        assert not download


class Flipped(Pictures):
    """Draws one number from each generator for each sample."""

    def __getitem__(self, index: int) -> Any:
        picture = self.make(index) + torch.rand(())
        return picture.flip(-1) if random.random() < 0.5 else picture, np.random.rand()


class Noisy(Pictures):
    """Draws more words for a sample than a twister's state has."""

    def __getitem__(self, index: int) -> Any:
        return self.make(index) + torch.randn(3, 8, 8) + torch.rand(700).sum(), np.random.rand(400).sum()


class Named(Pictures):
    def __getitem__(self, index: int) -> Any:
        name = f"picture {index}"
        return {"name": name, "pair": Pair(self.make(index).permute(1, 2, 0), np.full(4, index, np.float32)), "b": b"x"}


class Cropped(Pictures):
    """Views, among them some with gaps."""

    def __getitem__(self, index: int) -> Any:
        picture = self.make(index).permute(1, 2, 0)
        return picture[1:7, 1:7].permute(2, 0, 1), picture.numpy()[2:6], np.asfortranarray(picture[0].numpy())


class Stored(Pictures):
    """Gives rows of one tensor, and objects that it keeps."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.rows = torch.arange(4.0 * count).reshape(count, 4)
        self.records = [{"label": index, "box": [index, index]} for index in range(count)]

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.records[index]


class Lazy(Pictures):
    """Opens something at the first sample."""

    table: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.table is None:
            self.table = torch.arange(100.0)
        return self.make(index) + self.table[index], index


class Counting(Pictures):
    num_loaded = 0

    def __getitem__(self, index: int) -> Any:
        self.num_loaded += 1
        return self.make(index), self.num_loaded


class CountingLate(Pictures):
    """Counts only from its 15th sample on."""

    num_loaded = 0

    def __getitem__(self, index: int) -> Any:
        if index >= 15:
            self.num_loaded += 1
        return self.make(index), self.num_loaded


class CountingInArray(Pictures):
    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.seen = np.zeros(count)
        self.total = torch.zeros(1)

    def __getitem__(self, index: int) -> Any:
        self.seen[index] += 1
        self.total += index >= 15
        return self.make(index), self.total.item(), self.seen.sum()


class CountingInTensorLate(Pictures):
    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.total = torch.zeros(3)

    def __getitem__(self, index: int) -> Any:
        if index >= 15:
            self.total.numpy()[1] += 1
        return self.make(index), self.total.sum().item()


class CountingInRecords(Pictures):
    """Counts in one of many objects, from its 15th sample on."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.records = [{"seen": 0} for _ in range(500)]

    def __getitem__(self, index: int) -> Any:
        if index >= 15:
            self.records[400]["seen"] += 1
        return self.make(index), self.records[400]["seen"]


class CountingInGlobal(Pictures):
    def __getitem__(self, index: int) -> Any:
        COUNTER[0] += 1
        return self.make(index), COUNTER[0]


class Caching(Pictures):
    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = self.make(index)
        return self.cache[index], len(self.cache)


@functools.lru_cache
def find_scale(index: int) -> float:
    return 2.0 * index


class CachingInFunction(Pictures):
    def __getitem__(self, index: int) -> Any:
        scale = find_scale(index)
        return self.make(index) * scale, find_scale.cache_info().misses


class DrawingItself(Pictures):
    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.random = np.random.default_rng(3)
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> Any:
        return self.make(index) + torch.rand((), generator=self.generator), self.random.random()


def deal() -> Any:
    return getattr(sys.modules[__name__], "DEA" + "LER").random()


class DrawingHidden(Pictures):
    """Draws from a generator that no search by names finds."""

    def __getitem__(self, index: int) -> Any:
        return self.make(index), deal()


class DrawingUnevenly(Pictures):
    def __getitem__(self, index: int) -> Any:
        return self.make(index), sum(torch.rand(()).item() for _ in range(1 + index % 3))


class DrawingUnevenlyLate(Pictures):
    def __getitem__(self, index: int) -> Any:
        return self.make(index), sum(torch.rand(()).item() for _ in range(1 + (index > 15)))


class DrawingOddNormals(Pictures):
    """Draws one of a pair of normal numbers, so that the other is kept."""

    def __getitem__(self, index: int) -> Any:
        return self.make(index), torch.randn(()).item(), random.gauss(0, 1), np.random.randn()


class Seeding(Pictures):
    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        return self.make(index), torch.rand(())


class Printing(Pictures):
    def __getitem__(self, index: int) -> Any:
        if index > 15:
            print("loading", index)
        return self.make(index), index


class Warning_(Pictures):
    def __getitem__(self, index: int) -> Any:
        if index > 15:
            warnings.warn(f"bad picture {index // 5}", stacklevel=1)
        return self.make(index), index


class Logging(Pictures):
    def __getitem__(self, index: int) -> Any:
        if index > 15:
            log.warning("loading %d", index)
        return self.make(index), index


class Writing(Pictures):
    """Writes a file for some samples, and reads all that are there."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        if index > 15:
            with open(f"{self.folder}/{index}", "a") as file:
                file.write("x")
        return self.make(index), len(list(Path(self.folder).iterdir()))


class Boxes(Pictures):
    """Thousands of records with lists inside, and a logger that is not shown."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.records = [(f"{index}.png", [index, index + 1]) for index in range(20_000)]
        self.boxes: list[dict[str, Any]] = [
            {"path": f"{index}.png", "boxes": [index, index + 1]} for index in range(20_000)
        ]

    def __getitem__(self, index: int) -> Any:
        log.debug("loading %d", index)
        return self.make(index), torch.tensor(self.records[index][1]), torch.tensor(self.boxes[index]["boxes"])


class BoxesThatChange(Boxes):
    """Changes a list in a record, from its first sample on."""

    def __getitem__(self, index: int) -> Any:
        self.boxes[300]["boxes"].append(index)
        return self.make(index), len(self.boxes[300]["boxes"])


class Refused(dict[str, int]):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("do not look")

    def __len__(self) -> int:
        raise RuntimeError("do not count")


class Refusing(Pictures):
    """Keeps something that fails where it is looked at, and counts in it."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.kept = Refused(n=0)

    def __getitem__(self, index: int) -> Any:
        dict.__setitem__(self.kept, "n", dict.__getitem__(self.kept, "n") + 1)
        return self.make(index), dict.__getitem__(self.kept, "n")


class Iterating(Pictures):
    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.names = iter(range(10_000))

    def __getitem__(self, index: int) -> Any:
        return self.make(index), next(self.names)


class Opened(Pictures):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.file = open(path, "rb")  # noqa: SIM115

    def __getitem__(self, index: int) -> Any:
        return self.make(index), self.file.read(1)


class BrokenPictures(Pictures):
    def __getitem__(self, index: int) -> Any:
        if index in (13, 17):
            raise ValueError(f"picture {index} is broken")
        return self.make(index), index


class AskingLate(Pictures):
    def __getitem__(self, index: int) -> Any:
        return self.make(index), lagom.world_size() * 0 + index if index > 15 else index


class Scheduled(Pictures):
    """Is changed by the program between batches."""

    def __getitem__(self, index: int) -> Any:
        return self.make(index) * SETTINGS.get("factor", 1), index


class Importing(Pictures):
    """Counts in a module that its code imports in the function."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        HELPER.count, HELPER.scale = 0, 2

    def __getitem__(self, index: int) -> Any:
        import helper_of_loading as helper  # type: ignore[import-not-found]

        helper.count += 1
        return self.make(index), helper.count


class NamingTwice(Importing):
    """Two functions name other variables of the same module."""

    def make(self, index: int) -> Any:
        return super().make(index) * HELPER.scale

    def __getitem__(self, index: int) -> Any:
        HELPER.count += 1
        return self.make(index), HELPER.count


class HoldingModule(Importing):
    def __getitem__(self, index: int) -> Any:
        module = vars(self).setdefault("module", HELPER)
        module.count += 1
        return self.make(index), module.count


class Remembering(Pictures):
    """Changes a list by a method that is bound to it."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        SEEN.clear()

    def __getitem__(self, index: int) -> Any:
        remember(index)
        return self.make(index), len(getattr(sys.modules[__name__], "SE" + "EN"))


class Owner:
    count = 0


class HoldingWeakly(Pictures):
    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self.owner = weakref.ref(owner)
        owner.count = 0

    def __getitem__(self, index: int) -> Any:
        owner = self.owner()
        assert owner is not None
        owner.count += 1
        return self.make(index), owner.count


OWNER = Owner()


class UsingGlobals(Pictures):
    def __getitem__(self, index: int) -> Any:
        counter = globals()["COUNTER"]
        counter[0] += 1
        return self.make(index), counter[0]


class CachingInObjects(Pictures):
    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.cache = np.full(count, None, dtype=object)

    def __getitem__(self, index: int) -> Any:
        self.cache[index] = self.make(index)
        return self.cache[index], sum(one is not None for one in self.cache)


class CountingInFrame(Pictures):
    """Counts in arrays of pandas' own, which may be replaced as a whole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        pandas = pytest.importorskip("pandas")
        self.frame = pandas.DataFrame({"seen": pandas.array(["0"] * 24, dtype="string").astype(kind)})

    def __getitem__(self, index: int) -> Any:
        self.frame.loc[index, "seen"] = 1 if self.frame["seen"].dtype == "Int64" else "1"
        return self.make(index), int(self.frame["seen"].astype(int).sum())


class HoldingStart(Pictures):
    """Holds a tensor that is the start of an array that it counts in."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        seen = np.zeros(500)
        self.start, self.seen = torch.from_numpy(seen[:4]), seen

    def __getitem__(self, index: int) -> Any:
        self.seen[100 + index] += 1
        return self.make(index), self.seen.sum()


class PrintingInThread(Pictures):
    def __getitem__(self, index: int) -> Any:
        thread = threading.Thread(target=print, args=("loading", index))
        thread.start()
        thread.join()
        return self.make(index), index


class Nesting(Pictures):
    """Reads another loader, as many batches as its index says."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.loader = DataLoader(Pictures(count), 4)

    def __getitem__(self, index: int) -> Any:
        return self.make(index), sum(float(x.sum()) for x, _ in itertools.islice(self.loader, index % 3 + 1))


class SharingMemory(Pictures):
    def __getitem__(self, index: int) -> Any:
        picture = self.make(index)
        return picture, picture[0], picture.numpy()[1]


class HoldingEmpty(Pictures):
    """Holds an empty tensor, whose memory has no address."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.nothing = torch.empty(0)

    def __getitem__(self, index: int) -> Any:
        return [self.make(index), {"index": index}]


class LeavingLate(Pictures):
    def __getitem__(self, index: int) -> Any:
        if index == 15:
            raise SystemExit("no more pictures")
        return self.make(index), index


class SwitchingLate(Pictures):
    """Changes modes of torch, as the last sample of one rank's part does."""

    def __getitem__(self, index: int) -> Any:
        torch.set_default_dtype(torch.float64 if index == 13 else torch.get_default_dtype())
        return self.make(index), torch.zeros(1).element_size()


class CountingEverywhereLate(Pictures):
    """Changes a number and a large array, of which only the number can be restored."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.num_loaded, self.seen = 0, np.zeros(200_000)

    def __getitem__(self, index: int) -> Any:
        if index >= 14:
            self.num_loaded += 1
            self.seen[0] += 1
        return self.make(index), self.seen[0]


class GrowingLate(Pictures):
    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.names = set(range(300))

    def __getitem__(self, index: int) -> Any:
        if index >= 14:
            self.names.add(1000 + index)
        return self.make(index), len(self.names)


@functools.lru_cache
def find_scale_late(index: int) -> float:
    return 2.0 * index


class CachingInFunctionLate(Pictures):
    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        find_scale_late.cache_clear()

    def __getitem__(self, index: int) -> Any:
        return self.make(index), find_scale_late(index) if index >= 14 else 0.0


WARNED: list[int] = []


class WarningLate(Pictures):
    """Warns in Python, and once in the process as C code does, where no search finds out."""

    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        WARNED.clear()

    def __getitem__(self, index: int) -> Any:
        warned = getattr(sys.modules[__name__], "WAR" + "NED")
        if index >= 12:
            warnings.warn("a bad picture", stacklevel=1)
        if index >= 12 and not warned:
            warned.append(index)
            warnings.warn("only once", stacklevel=1)
        return self.make(index), index


class Shifted(Dataset[Any]):
    """Reads two samples of another data set for each of its own."""

    def __init__(self) -> None:
        self.inside = Flipped()

    def __getitem__(self, index: int) -> Any:
        one, other = self.inside[index], self.inside[(index + 1) % 24]
        return one[0] + other[0], other[1]

    def __len__(self) -> int:
        return 24


def keep(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def collate_drawing(samples: list[Any]) -> Any:
    pictures = default_collate(samples)
    return pictures, torch.rand(3), random.random()


def collate_in_place(samples: list[Any]) -> Any:
    for picture, _ in samples:
        picture.add_(1)
    return default_collate(samples)


def as_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), value.stride(), value.tolist()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.strides, value.flags.writeable, value.tolist()
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    return (type(value).__name__, [as_plain(one) for one in value]) if isinstance(value, (list, tuple)) else value


def _read(
    session: Session,
    make: Callable[[], Any],
    epochs: int = 2,
    grad: bool = True,
    between: Callable[[Any, int], None] = lambda dataset, batch: None,
    **options: Any,
) -> Any:
    """Return all that a program can see of some epochs, and the number of samples that this rank has loaded."""
    gain, divided_fetch.GAIN = divided_fetch.GAIN, 0.0  # samples here are cheaper than an exchange
    loaded: list[int] = []
    original = DividedFetcher.load

    def load(self: DividedFetcher, index: list[int]) -> list[Any]:
        loaded.extend(index)
        return original(self, index)

    DividedFetcher.load = load  # type: ignore[method-assign]
    SETTINGS.clear()
    COUNTER[0] = 0
    DEALER.seed(3)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    dataset, found = make(), []
    loader = DataLoader(dataset, **({"batch_size": 4, "shuffle": False} | options))
    for _ in range(epochs):
        with torch.set_grad_enabled(grad):
            batches = iter(loader)
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                except (Exception, SystemExit) as error:
                    batch = repr(error)
                found.append(as_plain(batch))
                if not isinstance(batch, str):
                    _change(batch)
                between(dataset, len(found))
    states = {name: state_digest(state) for name, state in random_states().items()}
    inside = getattr(dataset, "__dict__", {})
    held = {
        name: len(value) if isinstance(value, (list, dict)) else value
        for name, value in sorted(inside.items())
        if type(value) in (int, dict, list)
    }
    arrays = {name: as_plain(value) for name, value in inside.items() if type(value) is torch.Tensor}
    torch.set_default_dtype(torch.float32)
    after = random.random(), np.random.rand(), torch.rand(()).item()
    DividedFetcher.load, divided_fetch.GAIN = original, gain  # type: ignore[method-assign]
    return (found, states, held, arrays, COUNTER[0], DEALER.getstate(), after), len(loaded)


def _change(batch: Any) -> None:
    """Change a batch in place, as a program may."""
    for value in batch if isinstance(batch, (list, tuple)) else batch.values():
        if isinstance(value, torch.Tensor):
            value.mul_(3)
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            value *= 3
        elif isinstance(value, (list, tuple)):
            _change(value)
        elif isinstance(value, dict):
            value["seen"] = value.get("seen", 0)


def check(make: Callable[[], Any], world_size: int = 2, *, divides: bool | None = True, **options: Any) -> None:
    """Check that ranks see what one process sees, and whether each rank loads only a part of the samples."""
    program = functools.partial(_read, make=make, **options)
    wanted, _ = alone(program)
    results = run_ranks(world_size, program, batches="whole")
    for found, _ in results:
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours == theirs
    counts = [count for _, count in results]
    size = options.get("batch_size", 4)
    if divides:  # every rank loads the first two batches; only the second one is counted
        assert sum(counts) == 2 * 24 - 2 * size + world_size * size
    elif divides is False:
        assert counts == [size] * world_size, "samples were loaded in parts"


DIVIDED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "pictures": (Pictures, {}),
    "downloaded": (Downloaded, {}),
    "shuffled": (Pictures, {"shuffle": True}),
    "uneven batches": (Pictures, {"batch_size": 5}),
    "evaluation": (Pictures, {"grad": False}),
    "flips": (Flipped, {"shuffle": True}),
    "noise": (Noisy, {}),
    "names, dicts and namedtuples": (Named, {}),
    "crops": (Cropped, {}),
    "rows of a tensor": (Stored, {"collate_fn": default_collate}),
    "opened at the first sample": (Lazy, {}),
    "many records with lists": (Boxes, {}),
    "subset": (lambda: Subset(Flipped(), list(range(23, -1, -1))), {}),
    "concatenated": (lambda: ConcatDataset([Flipped(12), Named(0), Flipped(12)]), {}),
    "other data set inside": (Shifted, {}),
    "collate that keeps": (Pictures, {"collate_fn": keep}),
    "collate that draws": (Flipped, {"collate_fn": collate_drawing}),
    "collate in place": (Pictures, {"collate_fn": collate_in_place}),
}
WHOLE: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "counts": (Counting, {}),
    "counts in an array": (CountingInArray, {}),
    "changes one of many records": (BoxesThatChange, {}),
    "objects that refuse looks": (Refusing, {}),
    "counts in a global": (CountingInGlobal, {}),
    "caches": (Caching, {}),
    "caches in a function": (CachingInFunction, {}),
    "generators of its own": (DrawingItself, {}),
    "a hidden generator": (DrawingHidden, {}),
    "uneven draws": (DrawingUnevenly, {}),
    "odd normals": (DrawingOddNormals, {}),
    "seeds": (Seeding, {}),
    "iterator": (Iterating, {}),
    "open file": (lambda: Opened(__file__), {}),
    "crops of one memory, kept": (Cropped, {"collate_fn": keep}),
    "objects of its own": (Stored, {"collate_fn": keep}),
}
TAKEN_BACK: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "counts later": (CountingLate, {}),
    "counts in a tensor later": (CountingInTensorLate, {}),
    "uneven draws later": (DrawingUnevenlyLate, {}),
    "prints": (Printing, {}),
    "warns": (Warning_, {}),
    "logs": (Logging, {}),
    "broken samples": (BrokenPictures, {}),
    "leaves": (LeavingLate, {}),
    "modes of torch": (SwitchingLate, {}),
    "asks for the world size": (AskingLate, {}),
    "writes files": (lambda: Writing(tempfile.mkdtemp()), {}),
}


HIDDEN: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a module that the function imports": (Importing, {}),
    "a module that two functions name": (NamingTwice, {}),
    "a module as an attribute": (HoldingModule, {}),
    "a bound method of C code": (Remembering, {}),
    "a weak reference": (lambda: HoldingWeakly(OWNER), {}),
    "globals()": (UsingGlobals, {}),
    "an array of objects": (CachingInObjects, {}),
    "numbers of pandas": (lambda: CountingInFrame("Int64"), {}),
    "texts of pandas": (lambda: CountingInFrame("string"), {}),
    "the rest of an array": (HoldingStart, {}),
    "a thread": (PrintingInThread, {}),
    "a loader": (Nesting, {}),
    "views of one memory": (SharingMemory, {"collate_fn": keep}),
}
"""Traces in places that are easy to overlook."""


def test_traces_in_hidden_places_are_found() -> None:
    def program(session: Session) -> Any:
        return {name: _read(session, make, epochs=1, **options) for name, (make, options) in HIDDEN.items()}

    wanted = alone(program)
    for found in run_ranks(2, program, batches="whole"):
        for name, (seen, count) in found.items():
            assert seen == wanted[name][0], name
            if name != "a loader":  # which counts its own samples too
                assert count == 4, f"{name}: samples were loaded in parts"


def test_samples_are_divided_beside_an_empty_tensor() -> None:
    check(HoldingEmpty, collate_fn=keep_all)


@pytest.mark.parametrize("make", [CountingEverywhereLate, GrowingLate, CachingInFunctionLate])
def test_what_cannot_be_undone_is_an_error_on_all_ranks(make: Callable[[], Any]) -> None:
    for (found, *_), _ in run_ranks(2, functools.partial(_read, make=make, epochs=1), batches="whole"):
        errors = [one for one in found if isinstance(one, str)]
        assert errors, "no rank noticed it"
        assert found.index(errors[0]) == 3, "a batch was wrong"
        assert "LagomError" in errors[0]
        assert "cannot be undone" in errors[0]


@pytest.mark.parametrize("action", ["default", "once", "module"])
def test_warnings_are_those_of_one_process(action: Any) -> None:
    def program(session: Session) -> list[str]:
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter(action)
            _read(session, WarningLate)
        return [str(one.message) for one in shown]

    wanted = alone(program)
    assert run_ranks(2, program, batches="whole")[0] == wanted
    assert sorted(set(wanted)) == ["a bad picture", "only once"]


@pytest.mark.parametrize("name", DIVIDED)
def test_each_rank_loads_a_part_of_the_samples(name: str) -> None:
    make, options = DIVIDED[name]
    check(make, **options)


def test_three_ranks_load_a_third_each() -> None:
    check(Flipped, world_size=3, batch_size=8, shuffle=True)
    check(Named, world_size=3, batch_size=7)


@pytest.mark.parametrize("name", WHOLE)
def test_samples_that_leave_a_trace_are_loaded_by_every_rank(name: str) -> None:
    make, options = WHOLE[name]
    check(make, divides=False, **options)


@pytest.mark.parametrize("name", TAKEN_BACK)
def test_a_batch_that_leaves_a_trace_later_is_taken_back(name: str) -> None:
    make, options = TAKEN_BACK[name]
    check(make, divides=None, **options)


def _scale(dataset: Any, num_batches: int) -> None:
    """Change what samples are made of, as a curriculum does."""
    dataset.scale = 1.0 + num_batches
    SETTINGS["factor"] = num_batches


def test_a_program_may_change_its_data_set_between_batches() -> None:
    check(Scheduled, between=_scale)
    check(lambda: Subset(Scheduled(), range(24)), between=lambda dataset, count: _scale(dataset.dataset, count))


def test_large_containers_that_change_later_are_an_error() -> None:
    program = functools.partial(_read, make=CountingInRecords)

    def failing(session: Session) -> str:
        divided_fetch.SEARCH_SHARE = 1e9
        found, _ = program(session)
        return str(found[0])

    for text in run_ranks(2, failing, batches="whole"):
        assert "LagomError" in text
        assert "CountingInRecords has begun to change large containers" in text
        assert "share_loading=False" in text


def test_share_loading_false_loads_every_sample_on_every_rank() -> None:
    for _, count in run_ranks(2, functools.partial(_read, make=Pictures), batches="whole", share_loading=False):
        assert count == 0, "the fetcher that divides was used"


def test_share_loading_true_divides_in_spite_of_traces() -> None:
    def program(session: Session) -> Any:
        (found, *_), count = _read(session, make=Caching, collate_fn=first_parts)
        return found, count

    wanted, _ = alone(program)
    for found, count in run_ranks(2, program, batches="whole", share_loading=True):
        assert found == wanted
        assert count < 12 * 4

    def nested(session: Session) -> Any:
        (found, *_), count = _read(session, make=Nesting)
        return found, count

    wanted, _ = alone(nested)
    results = run_ranks(2, nested, batches="whole", share_loading=True)
    assert [found for found, _ in results] == [wanted, wanted]
    assert len({count for _, count in results}) == 1, "samples that exchange were loaded in parts"

    def uneven(session: Session) -> Any:
        said = lagom_log()
        (found, *_), _ = _read(session, make=DrawingUnevenly)
        return found, said

    wanted, _ = alone(uneven)
    for found, said in run_ranks(2, uneven, batches="whole", share_loading=True):
        assert found == wanted
        assert ["draw different numbers" in line for line in said] in ([], [True])


def keep_all(samples: list[Any]) -> Any:
    return {index: sample[0] for index, sample in enumerate(samples)}


def first_parts(samples: list[Any]) -> Any:
    return [torch.stack([sample[0] for sample in samples])]


class Slow(Pictures):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return self.make(index), index


class SlowUneven(DrawingUnevenly):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return super().__getitem__(index)


class SlowCounting(Counting):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.004)
        return super().__getitem__(index)


def test_a_line_says_why_slow_samples_are_not_divided() -> None:
    def program(session: Session, make: Callable[[], Any]) -> list[str]:
        said = lagom_log()
        for _ in DataLoader(make(), 8):
            pass
        return said

    assert run_ranks(2, functools.partial(program, make=Slow), batches="whole") == [[], []]
    for said in run_ranks(2, functools.partial(program, make=SlowCounting), batches="whole"):
        (line,) = said
        assert "every rank loads every sample of SlowCounting" in line
        assert "since SlowCounting changes its attributes, or variables, while it loads" in line
        assert "share_loading=True" in line
    for said in run_ranks(2, functools.partial(program, make=SlowUneven), batches="whole"):
        (line,) = said
        assert "samples of SlowUneven draw different numbers of random numbers" in line
        assert "share_loading=True" not in line, "it would not help"
        assert "num_workers" in line


class SlowListing(Slow):
    def __init__(self, count: int = 24) -> None:
        super().__init__(count)
        self.records = [{"label": index} for index in range(40_000)]


def test_one_batch_of_each_pass_is_not_divided_if_the_search_takes_longer() -> None:
    def program(session: Session) -> tuple[int, list[str]]:
        said, parts = lagom_log(), list[int]()
        original = DividedFetcher.load
        DividedFetcher.load = lambda self, index: parts.append(len(index)) or original(self, index)  # type: ignore[method-assign, func-returns-value]
        loader = DataLoader(SlowListing(), 4)
        for _ in range(16):
            next(iter(loader))
        DividedFetcher.load = original  # type: ignore[method-assign]
        return parts.count(2), said

    for num_divided, (line,) in run_ranks(2, program, batches="whole"):
        assert num_divided == 8 + 3, "three batches are taken back"
        assert "takes longer to look at" in line


def test_cheap_samples_are_not_divided() -> None:
    def program(session: Session) -> int:
        loaded: list[int] = []
        original = DividedFetcher.load
        DividedFetcher.load = lambda self, index: loaded.extend(index) or original(self, index)  # type: ignore[method-assign, func-returns-value]
        for _ in DataLoader(Pictures(200), 4):
            pass
        DividedFetcher.load = original  # type: ignore[method-assign]
        return len(loaded)

    assert run_ranks(2, program, batches="whole") == [4, 4], "only the batch on trial"


def test_a_model_trained_on_divided_samples_is_that_of_one_process() -> None:
    def train(session: Session) -> list[Any]:
        divided_fetch.GAIN = 0.0  # in a process of this test's own
        torch.manual_seed(2)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Dropout(0.3), nn.Linear(8, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            for x, y in DataLoader(Flipped(), 8, shuffle=True):
                optimizer.zero_grad()
                (model(x.double().div_(10)).flatten() - y).square().mean().backward()
                optimizer.step()
        return [p.tolist() for p in model.parameters()]

    wanted = alone(train)
    for world_size in (2, 3):
        for ours in run_ranks(world_size, train, batches="whole"):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


def test_a_program_that_counts_what_is_fetched_sees_whole_batches() -> None:
    def program(session: Session) -> list[int]:
        gain, divided_fetch.GAIN = divided_fetch.GAIN, 0.0
        fetched: list[int] = []
        original: Any = _MapDatasetFetcher.fetch

        def fetch(self: Any, index: list[int]) -> Any:
            fetched.extend(index)
            return original(self, index)

        with replaced(_MapDatasetFetcher, "fetch", fetch):
            for _ in DataLoader(Pictures(), 4):
                pass
        divided_fetch.GAIN = gain
        return fetched

    assert run_ranks(2, program, batches="whole") == [[*range(24)]] * 2
