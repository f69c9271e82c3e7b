"""``Parcel``: any value that travels between driver and ranks, as one pickle with its large buffers uncopied."""

from __future__ import annotations

import copyreg
import ctypes
import functools
import importlib
import io
import json
import mmap
import os
import pickle
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _tracker

from lagom.errors import PayloadError
from lagom.unpicklable import DRIVERS_OWN, find_unpicklable, is_sparks

_MAGIC = b"lagom\x005\n"
_ALIGNMENT = 64
_Cached = type(functools.lru_cache(print))
_OUT_OF_BAND = 1 << 16  # bytes; copying a smaller buffer costs less than a piece of its own


class Parcel:
    """A pickled value, not yet written: its pickle and buffers, in the order of the file."""

    def __init__(self, value: object, at_home: Mapping[type, str] | None = None, *, by_reference: bool = False) -> None:
        """Pickle ``value``; pickle the classes ``at_home`` by the reader's ids. See Note [Classes of __main__].

        With ``by_reference``, classes and functions are pickled by name, and arrays own their memory, as they do when
        they come from another process through a queue of multiprocessing.

        Raises:
            PayloadError: if a part of it cannot be pickled, with that part's name.
        """
        self._frame(*_pickle(value, at_home or {}, by_reference))

    @classmethod
    def of_parts(cls, pickled: bytes, buffers: Sequence[memoryview]) -> Parcel:
        """Return a parcel of a value that is pickled already."""
        found = cls.__new__(cls)
        found._frame(pickled, list(buffers))
        return found

    def _frame(self, pickled: bytes, buffers: list[memoryview]) -> None:
        self._pickled, self._buffers = pickled, buffers
        sizes = [len(self._pickled), *(buffer.nbytes for buffer in self._buffers)]
        index = json.dumps(sizes).encode()
        self._head = _MAGIC + struct.pack(">Q", len(index)) + index
        self.size = len(self._head) + sum(_padding(size) + size for size in [len(self._head), *sizes]) - len(self._head)

    def parts(self) -> list[bytes | memoryview]:
        """Return the pickle and its buffers, for ``unpack_parts``."""
        return [self._pickled, *self._buffers]

    def pieces(self) -> Iterable[bytes | memoryview]:
        """Yield the bytes of the parcel, in order, without joining them."""
        yield self._head
        size = len(self._head)
        for piece in self.parts():
            yield bytes(_padding(size))
            yield piece
            size = memoryview(piece).nbytes
        yield bytes(_padding(size))

    def tobytes(self) -> bytes:
        """Return the parcel in one piece."""
        return b"".join(self.pieces())

    def write(self, fd: int) -> int:
        """Write the parcel to the file ``fd`` at its position; return its size in bytes."""
        for piece in self.pieces():
            view = memoryview(piece).cast("B")
            while view:
                view = view[os.write(fd, view[: 1 << 30]) :]
        return self.size


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Return the value of a parcel. Its arrays and tensors use ``data`` itself, and are writable if ``data`` is."""
    return unpack_parts(parts_of(data))


def parts_of(data: bytes | bytearray | memoryview) -> list[memoryview]:
    """Return the parts of a parcel, the pickle and its buffers, without a copy."""
    view = memoryview(data).cast("B")
    start = len(_MAGIC) + 8
    if bytes(view[: len(_MAGIC)]) != _MAGIC or len(view) < start:
        raise PayloadError("these bytes are no lagom parcel: they are cut off, or another version wrote them")
    (length,) = struct.unpack_from(">Q", view, len(_MAGIC))
    position, pieces = start + length, []
    if position > len(view):
        raise PayloadError(f"a parcel of more than {position} bytes arrived as {len(view)} bytes")
    previous = position
    for size in json.loads(bytes(view[start:position])):
        position += _padding(previous)
        pieces.append(view[position : position + size])
        position, previous = position + size, size
    if position > len(view):
        raise PayloadError(f"a parcel of {position} bytes arrived as {len(view)} bytes")
    return pieces


def unpack_parts(parts: Sequence[bytes | bytearray | memoryview]) -> Any:
    """Return the value of a parcel's ``parts``. Its arrays and tensors use the buffers themselves."""
    return pickle.loads(parts[0], buffers=parts[1:])


def unpack_file(fd: int, *, offset: int = 0) -> Any:
    """Return the value of the parcel in the file ``fd``, mapped: all processes that unpack it share its pages.

    A process's writes to an array are its own (the mapping is private, copy on write).
    """
    size = os.fstat(fd).st_size
    if size <= offset:
        raise PayloadError("there is nothing in the file of a parcel: its writer ended before it wrote")
    mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return unpack(memoryview(mapped)[offset:])


_by_value: set[str] = set()


@contextmanager
def pickled_by_value(modules: Iterable[types.ModuleType]) -> Iterator[None]:
    """Have pickles in the block hold what these modules define, and not its names; ``__main__`` is always so."""
    registered = [module for module in modules if module.__name__ != "__main__"]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
        _by_value.add(module.__name__)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
            _by_value.discard(module.__name__)


def classes_received() -> dict[type, str]:
    """Return the classes that unpacking has received by value so far, with the sender's ids for them."""
    return dict(_tracker._DYNAMIC_CLASS_TRACKER_BY_CLASS)


def _padding(size: int) -> int:
    return -size % _ALIGNMENT


def _pickle(value: object, at_home: Mapping[type, str], by_reference: bool) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    try:
        Pickler(stream, out_of_band, at_home, by_reference).dump(value)
    except Exception as error:
        culprit = find_unpicklable(value, _can_pickle)
        what = culprit or f"a {type(value).__name__}"
        why = " ".join(str(error).split())
        raise PayloadError(f"{what} cannot be pickled: {type(error).__name__}: {why}{_remedy(culprit)}") from error
    return stream.getvalue(), buffers


def _can_pickle(value: object) -> bool:
    try:
        Pickler(io.BytesIO(), lambda _: False, {}).dump(value)
    except Exception:  # the caller has the error already; only its place is wanted
        return False
    return True


def _remedy(culprit: str) -> str:
    if culprit.endswith(DRIVERS_OWN):
        return "; give a DataFrame as train_set or test_set, or collect what is needed before the call"
    return "; make it where it is used, inside of the function" if culprit.startswith("the variable") else ""


def _cached(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


_NO_FILE = "<dynamic-code>"


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle with torch's storages pickled out of band; never imports torch."""

    def __init__(
        self,
        stream: io.BytesIO,
        out_of_band: Callable[[pickle.PickleBuffer], Any],
        at_home: Mapping[type, str],
        by_reference: bool = False,
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=out_of_band)
        self._by_reference = by_reference
        if by_reference:
            self.dispatch_table = copyreg.dispatch_table
        self._storages: dict[tuple[str, int, int], _Storage] = {}
        self._at_home = at_home

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type) and value in self._at_home:
            return _class_at_home, (self._at_home[value], value.__qualname__)
        if isinstance(value, types.CodeType):
            make, given = _tracker._code_reduce(value)
            # cloudpickle 3.1.3 drops the file's name, by which tracebacks, debuggers and TorchScript find the source.
            return make, tuple(value.co_filename if one == _NO_FILE else one for one in given)
        if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
            # A module of a class of its own, which cloudpickle does not know, such as torch.backends.cudnn.
            name: str = value.__name__
            if sys.modules.get(name) is value:
                return importlib.import_module, (name,)
        if type(value).__name__ in ("Accumulator", "Broadcast") and is_sparks(value):
            raise pickle.PicklingError("it has its value in Spark's own functions only")
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.storage.TypedStorage):
            return _typed_storage, (self._storage(value._untyped_storage), value.dtype)
        if torch is not None and isinstance(value, torch.UntypedStorage):
            # Tensors of dtypes without typed storages, such as float8, have an untyped one. It travels as one of bytes,
            # from which torch takes the untyped one again.
            return _typed_storage, (self._storage(value), torch.uint8)
        if self._by_reference:
            numpy = sys.modules.get("numpy")
            return value.__reduce_ex__(4) if numpy is not None and isinstance(value, numpy.ndarray) else NotImplemented
        if type(value) is _Cached and (
            value.__module__ in _by_value or _tracker._lookup_module_and_qualname(value) is None
        ):
            # cloudpickle leaves it to pickle, which would look for its name in the reader's __main__.
            settings = value.cache_parameters()
            return _cached, (value.__wrapped__, settings["maxsize"], settings["typed"])
        return super().reducer_override(value)

    def _storage(self, storage: Any) -> _Storage:
        # Tensors that share memory must share it on the other side too: pickle remembers each _Storage.
        key = (storage.device.type, storage.data_ptr(), storage.nbytes())
        if key not in self._storages or storage.nbytes() == 0:
            self._storages[key] = _Storage(storage)
        return self._storages[key]


class _Storage:
    """Stands for a torch storage in a pickle; unpickles as the storage."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        cpu = self._storage if self._storage.device.type == "cpu" else self._storage.cpu()
        memory = memoryview((ctypes.c_char * cpu.nbytes()).from_address(cpu.data_ptr() or 0)) if cpu.nbytes() else b""
        # ctypes borrows the memory; the storage must outlive the parcel.
        return _untyped_storage, (pickle.PickleBuffer(_kept(memory, cpu)), self._storage.device.type)


def _class_at_home(class_id: str, name: str) -> type:
    try:
        found: type = _tracker._DYNAMIC_CLASS_TRACKER_BY_ID[class_id]
    except KeyError:
        raise PayloadError(f"the class {name} went out from here, but is no longer here") from None
    return found


def _kept(memory: memoryview | bytes, owner: object) -> memoryview:
    """Return ``memory`` as bytes that keep ``owner`` alive."""
    if isinstance(memory, bytes):
        return memoryview(memory)
    array: Any = memory.obj
    array._owner = owner
    return memoryview(array).cast("B")


def _untyped_storage(buffer: Any, device: str) -> Any:
    import torch

    view = memoryview(buffer)
    if view.nbytes == 0:
        return torch.UntypedStorage(0)
    if view.readonly:
        view = memoryview(bytearray(view))
    memory = torch.frombuffer(view, dtype=torch.uint8)
    if view.nbytes < _OUT_OF_BAND:
        memory = memory.clone()  # aligned as torch aligns its own: sums of libraries may depend on that
    storage = memory.untyped_storage()
    return storage.cuda() if device == "cuda" and torch.cuda.is_available() else storage


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


class InParts:
    """An exception that is pickled by class, arguments and attributes, and unpickles as itself.

    Exceptions are pickled as a call of their class with their ``args``, and a class with an ``__init__`` of its own may
    need others.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _put_together, (type(self._error), self._error.args, dict(vars(self._error)))


def _put_together(kind: type[BaseException], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> BaseException:
    """Rebuild a pickled exception without calling its ``__init__``, which may want other arguments."""
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(attributes)
    return error


# Note [Classes of __main__]
#
# A notebook's class travels by value. If it also came back by value, cloudpickle would find the driver's class by its
# id and set all attributes of the rank's copy on it: its methods would from then on see the rank's globals instead of
# the notebook's, and class attributes that the rank changed would change in the notebook. So a rank sends such classes
# back by their id alone.
