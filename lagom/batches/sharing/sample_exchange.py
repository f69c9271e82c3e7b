"""``SampleExchange``: all ranks give each other the samples that each has loaded."""

from __future__ import annotations

import copyreg
import io
import pickle
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lagom.errors import DivergenceError, PayloadError
from lagom.exchange.agreement_exchange import SIZE, memory, signature
from lagom.exchange.plain_values import decode_value, encode_value
from lagom.program.pickler import Pickler
from lagom.run_state.kept_memory import KeptMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lagom.session.session import Session

_PLACE = "the next batch of a data loader without workers"
_ALIGNMENT = 64
_TOGETHER = 1 << 14
"""Up to this many bytes of elements, they travel in one message with the pickle."""
_MOST_GAPS = 4
"""Largest ratio of the memory that a tensor spans to that of its elements."""


class SampleExchange:
    """Gives each rank the samples of all; tensors and arrays arrive as copies with equal strides."""

    def __init__(self, session: Session) -> None:
        assert session.group is not None
        self.kinds: set[type] = set()
        """Classes of the objects in samples, besides Python's own, that were seen to arrive as they are."""
        self._session, self._group = session, session.group
        self._mark = signature(_PLACE.encode())
        self._memory = KeptMemory()

    def gather(
        self, note: Any, mine: Sequence[Any], *, own_memory: bool, learns: bool = False
    ) -> list[tuple[Any, list[Any]]]:
        """Return the note and the samples of each rank; this rank's own are those given; a collective.

        Args:
            note: anything small that can be pickled.
            mine: this rank's samples.
            learns: whether objects of other classes than ``kinds`` are sent too, and their classes added.
            own_memory: whether each tensor that arrives has a storage to itself; else they are views of one.

        Raises:
            DivergenceError: on all ranks, if one is at another place of the program.
            PayloadError: before anything is sent, if a sample cannot be sent so that it arrives as it is.
        """
        # Reading a pickle runs code of its sender, so pickles travel only where nobody else can write.
        packed = _Packed(mine, None if learns else self.kinds, pickles=self._group.shares_memory)
        if own_memory:
            packed.check_overlaps()
        self.kinds |= packed.kinds
        small = packed.num_bytes <= _TOGETHER
        joined = packed.joined() if small else b""
        rows = self._exchange(encode_value((note, packed.outline, packed.places, packed.num_bytes, joined)))
        decoded = [decode_value(bytes(row[SIZE:])) for row in rows]
        most = max((0 if one[4] else one[3]) for one in decoded)
        elements = self._gather_elements(packed, small, most) if most else None
        result = []
        for rank, (other, outline, places, size, joined) in enumerate(decoded):
            if rank == self._session.rank:
                result.append((other, list(mine)))
                continue
            if joined or not size:
                block = (
                    torch.frombuffer(bytearray(joined), dtype=torch.uint8) if joined else torch.empty(0, device="cpu")
                )
            else:
                assert elements is not None
                block = elements[rank * most : rank * most + size]
            values = _read_values(places, block, own_memory)
            pickles = self._group.shares_memory
            result.append((other, _unpickled(outline, values) if pickles else _filled(outline, values)))
        return result

    def _gather_elements(self, packed: _Packed, small: bool, most: int) -> Tensor:
        whole = self._memory.empty((self._session.world_size * most,), torch.uint8)
        part = self._memory.empty((most,), torch.uint8)
        if not small:
            packed.write(memory(part))
        self._group.all_gather_into(whole, part)
        return whole

    def _exchange(self, head: bytes) -> list[memoryview]:
        rows = self._group.exchange(self._mark + head)
        if any(row[:SIZE] != self._mark for row in rows):
            divergence = self._session.backwards.divergence
            assert divergence is not None
            divergence.find_divergence(_PLACE)
            raise DivergenceError(f"other ranks were not at {_PLACE}")
        return rows


class _Packed:
    """Samples, taken apart into their tensors and arrays, and an outline with the numbers of these."""

    def __init__(self, samples: Sequence[Any], kinds: set[type] | None, *, pickles: bool) -> None:
        self._values: list[Any] = []
        stream = io.BytesIO()
        pickler = _SamplePickler(stream, self._values, kinds)
        try:
            if pickles:
                pickler.dump(list(samples))
            outline = stream.getvalue() if pickles else _outline(list(samples), pickler.persistent_id)
        except Exception as error:
            raise PayloadError(f"a sample cannot be sent: {error}") from error
        self.kinds = pickler.kinds
        self.outline = outline
        """A pickle, or plain values."""
        self.places: list[_Place] = []
        """Where each tensor or array lies among the elements."""
        self.num_bytes = 0
        for value in self._values:
            place = _place_of(value, self.num_bytes)
            self.places.append(place)
            self.num_bytes = -(-(place[0] + place[1]) // _ALIGNMENT) * _ALIGNMENT

    def check_overlaps(self) -> None:
        """Raise a PayloadError if two tensors or arrays share memory, as those that arrive do not."""
        spans = sorted((_first_byte(one), place[1]) for one, place in zip(self._values, self.places, strict=True))
        spans = [(first, size) for first, size in spans if size]
        if any(first + size > other for (first, size), (other, _) in pairwise(spans)):
            raise PayloadError("some of its tensors or arrays share memory")

    def joined(self) -> bytes:
        found = bytearray(self.num_bytes)
        self.write(memoryview(found))
        return bytes(found)

    def write(self, to: memoryview) -> None:
        """Write the elements of all tensors and arrays."""
        for value, (start, size, *_) in zip(self._values, self.places, strict=True):
            if not size:
                continue
            if isinstance(value, np.ndarray):
                span = np.lib.stride_tricks.as_strided(value, (size // value.itemsize,), (value.itemsize,))
                np.frombuffer(to, np.uint8, size, start)[...] = span.view(np.uint8)
            else:
                span = value.as_strided((size // value.element_size(),), (1,))
                torch.frombuffer(to, dtype=value.dtype, count=len(span), offset=start).copy_(span)


def _first_byte(value: Any) -> int:
    return int(value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr())


_Place = tuple[int, int, Any, Any, Any, bool | None]
"""First byte, number of bytes, dtype, shape and strides; of an array, whether it can be written, else None.

The dtype of an array is a text.
"""


class _SamplePickler(Pickler):
    def __init__(self, stream: io.BytesIO, values: list[Any], known: set[type] | None) -> None:
        super().__init__(stream, lambda _: True, {}, by_reference=True)
        self.dispatch_table = copyreg.dispatch_table
        self._values, self._known = values, known
        self.kinds: set[type] = set()
        self._indices: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        """Note the class of an object, and pickle it.

        Raises:
            PayloadError: if its class is not known to arrive as it is.
        """
        kind = value if isinstance(value, type) else type(value)
        if self._known is not None and kind not in self._known:
            raise PayloadError(f"it holds a {kind.__name__}, as no earlier one did")
        self.kinds.add(kind)
        return super().reducer_override(value)

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a tensor or an array; None for other values."""
        kind = type(value)
        if not issubclass(kind, (torch.Tensor, np.ndarray)):
            return None
        if id(value) not in self._indices:
            _check(value)
            self._indices[id(value)] = len(self._values)
            self._values.append(value)
        return self._indices[id(value)]


def _unpickled(outline: bytes, values: Sequence[Any]) -> list[Any]:
    """Return the samples of an outline that is a pickle."""
    unpickler: Any = pickle.Unpickler(io.BytesIO(outline))
    unpickler.persistent_load = values.__getitem__
    found: list[Any] = unpickler.load()
    return found


def _check(value: Any) -> None:
    """Raise a PayloadError unless a tensor or array can arrive as it is."""
    if type(value) is torch.Tensor:
        is_plain = value.is_cpu and value.layout is torch.strided and not (value.is_nested or value.is_quantized)
        is_frozen = value.is_inference() and not torch.is_inference_mode_enabled()
        if not is_plain or value.requires_grad or value.is_conj() or value.is_neg() or is_frozen:
            raise PayloadError("it is a tensor with gradients, or of another kind than ordinary ones on the CPU")
        if vars(value) or value._is_zerotensor() or value.is_shared():
            raise PayloadError("it is a tensor with attributes, or in shared memory")
        span, size = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)), value.numel()
    elif type(value) is np.ndarray and not value.dtype.hasobject and value.dtype.names is None:
        if not value.itemsize or any(stride < 0 or stride % value.itemsize for stride in value.strides):
            raise PayloadError("it is an array that lies backwards, or has other bytes between its elements")
        steps = [stride // value.itemsize for stride in value.strides]
        span, size = 1 + sum((n - 1) * s for n, s in zip(value.shape, steps, strict=True)), value.size
    else:
        raise PayloadError(f"it is a {type(value).__name__} of another kind than ordinary numbers")
    if size and span > _MOST_GAPS * size:
        raise PayloadError("it is a small part of a large tensor or array")


def _place_of(value: Any, start: int) -> _Place:
    is_array = isinstance(value, np.ndarray)
    steps = tuple(stride // value.itemsize for stride in value.strides) if is_array else value.stride()
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, steps, strict=True)) if 0 not in value.shape else 0
    itemsize = value.itemsize if is_array else value.element_size()
    writes = value.flags.writeable if is_array else None
    dtype = value.dtype.str if is_array else value.dtype
    return start, span * itemsize, dtype, tuple(value.shape), tuple(steps), writes


def _outline(value: Any, number_of: Callable[[Any], int | None]) -> Any:
    """Return plain values for ``encode_value``, with the number of each tensor and array in its place.

    Raises:
        PayloadError: if there is an object of another class than Python's, which only a pickle can hold.
    """
    kind = type(value)
    if (index := number_of(value)) is not None:
        return {"number": index}
    if value is None or kind in (bool, int, float, str, bytes, complex) or issubclass(kind, np.generic):
        return {"value": value}
    if kind in (list, tuple):
        return {kind.__name__: [_outline(item, number_of) for item in value]}
    if kind is dict:
        return {"dict": [(_outline(key, number_of), _outline(item, number_of)) for key, item in value.items()]}
    raise PayloadError(f"it holds a {kind.__name__}, and ranks are on several hosts or do not share memory")


def _filled(outline: Any, values: Sequence[Any]) -> Any:
    """Return the samples of an outline."""
    ((name, held),) = outline.items()
    if name == "number":
        return values[held]
    if name == "value":
        return held
    if name == "dict":
        return {_filled(key, values): _filled(item, values) for key, item in held}
    return (list if name == "list" else tuple)(_filled(item, values) for item in held)


def _read_values(places: Sequence[_Place], block: Tensor, own_memory: bool) -> list[Any]:
    """Return the tensors and arrays whose elements are in ``block``."""
    values: list[Any] = []
    for start, size, kind, shape, steps, writes in places:
        part = block[start : start + size]
        part = part.clone() if own_memory else part
        if writes is None:
            offset = part.storage_offset() // kind.itemsize
            empty = torch.empty(0, dtype=kind, device="cpu")
            values.append(empty.set_(part.untyped_storage(), offset, shape, steps) if size else empty.new_empty(shape))
            continue
        dtype = np.dtype(kind)
        strides = [step * dtype.itemsize for step in steps]
        flat = part.numpy().view(dtype) if size else np.empty(0, dtype)
        array = np.lib.stride_tricks.as_strided(flat, shape, strides) if size else np.empty(shape, dtype)
        if not writes:
            array.flags.writeable = False
        values.append(array)
    return values
