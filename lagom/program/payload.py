"""``Parcel``: any value that travels between driver and ranks, as one pickle with its large buffers uncopied."""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from lagom.errors import PayloadError
from lagom.program.pickler import OUT_OF_BAND, Pickler

_MAGIC = b"lagom\x005\n"
_ALIGNMENT = 64
_PIECE = 1 << 22
"""Most bytes of a write."""


class Digest(Protocol):
    """A digest of ``hashlib``."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes."""


class Parcel:
    """A pickled value, not yet written: its pickle and buffers, in the order of the file."""

    def __init__(
        self, value: object, own_classes: Mapping[type, str] | None = None, *, by_reference: bool = False
    ) -> None:
        """Pickle ``value``; pickle ``own_classes``, which came from the reader, by the reader's ids for them.

        See Note [Classes of __main__] in program/pickler.py.

        With ``by_reference``, classes and functions are pickled by name, and unpickled arrays own their memory, as
        arrays do that arrive through a multiprocessing queue.

        Raises:
            PayloadError: if a part of ``value`` cannot be pickled; the text names the part.
        """
        self._frame(*_pickle(value, own_classes or {}, by_reference))

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

    def write(self, fd: int, digest: Digest | None = None) -> int:
        """Write the parcel to the file ``fd`` at the file's position; return the parcel's size in bytes.

        Args:
            digest: gets the parcel's bytes as well.
        """
        for piece in self.pieces():
            view = memoryview(piece).cast("B")
            while view:
                written = os.write(fd, view[:_PIECE])
                if digest is not None:
                    digest.update(view[:written])  # just written, so much of it is still in the processor's cache
                view = view[written:]
        return self.size


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Return the value of a parcel.

    Its arrays and tensors of ``OUT_OF_BAND`` bytes and more use ``data`` itself. If ``data`` is read-only, such arrays
    are too, and tensors are copies.

    Raises:
        PayloadError: as ``parts_of``.
    """
    return unpack_parts(parts_of(data))


def parts_of(data: bytes | bytearray | memoryview) -> list[memoryview]:
    """Return the parts of a parcel, the pickle and its buffers, without a copy.

    Raises:
        PayloadError: if ``data`` is not a whole parcel.
    """
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
    """Return the value of a parcel's ``parts``. Its large arrays and tensors use the buffers, as with ``unpack``."""
    return pickle.loads(parts[0], buffers=parts[1:])


def unpack_file(fd: int, *, offset: int = 0) -> Any:
    """Return the value of the parcel in the file ``fd``, mapped: all processes that unpack it share its pages.

    A process's writes to an array are its own (the mapping is private, copy on write).

    Args:
        offset: bytes before the parcel.

    Raises:
        PayloadError: if the file has no whole parcel.
    """
    size = os.fstat(fd).st_size
    if size <= offset:
        raise PayloadError("there is nothing in the file of a parcel: its writer ended before it wrote")
    mapped = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return unpack(memoryview(mapped)[offset:])


def _padding(size: int) -> int:
    return -size % _ALIGNMENT


def _pickle(value: object, own_classes: Mapping[type, str], by_reference: bool) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    try:
        Pickler(stream, out_of_band, own_classes, by_reference).dump(value)
    except Exception as error:
        from lagom.program.unpicklable import find_unpicklable  # imported for the error only

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
    from lagom.program.unpicklable import DRIVERS_OWN

    if culprit.endswith(DRIVERS_OWN):
        return "; give a DataFrame as train_set or test_set, or collect what is needed before the call"
    return "; make it where it is used, inside of the function" if culprit.startswith("the variable") else ""


class InParts:
    """An exception that is pickled by class, arguments and attributes, and unpickles as itself.

    By default, an exception is pickled as a call of its class with its ``args``, which fails for a class whose
    ``__init__`` takes other arguments.
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
