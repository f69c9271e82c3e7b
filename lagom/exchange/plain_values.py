"""Plain values sent between ranks, as JSON and the bytes of tensors; decoding runs no code of the sender."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from lagom.exchange.transport import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable

_LENGTH = struct.Struct("<Q")
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class _Gathers(Protocol):
    def all_gather_bytes(self, data: bytes) -> list[bytes]: ...


def all_gather_values(group: _Gathers, value: object) -> list[Any]:
    """Return the ``value`` of every rank, in rank order; a collective. Named tuples become tuples.

    Raises:
        TypeError: as ``encode_value``.
    """
    return [decode_value(part) for part in group.all_gather_bytes(encode_value(value))]


def encode_value(value: object) -> bytes:
    """Return ``value`` as bytes.

    ``value`` may consist of numbers, texts, bytes, None, slices, ranges, tensors (dense or COO), arrays of numbers,
    torch's types and devices, and of lists, tuples, sets and dicts of them.

    Raises:
        TypeError: when ``value`` has anything else in it.
    """
    parts: list[bytes] = []
    text = json.dumps(_encoded(value, parts), separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *parts])


def decode_value(data: bytes) -> Any:
    """Return the value that ``encode_value`` encoded as ``data``, with all tensors on the CPU.

    Raises:
        ValueError: when ``data`` is cut off or has an unknown kind of value. Other damage may raise other errors.
    """
    (size,) = _LENGTH.unpack_from(data)
    position = _LENGTH.size + size

    def take(count: int) -> bytes:
        nonlocal position
        position += count
        if count < 0 or position > len(data):
            raise ValueError("a value of another rank is cut off")
        return data[position - count : position]

    return _decoded(json.loads(data[_LENGTH.size : position]), take)


def _encoded(value: Any, parts: list[bytes]) -> Any:
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":  # first: ``np.float64`` is a subclass of float
        return {"number": _encoded(np.asarray(value), parts)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_encoded(item, parts) for item in value]
    if isinstance(value, (tuple, set, frozenset)):
        name = next(name for name, kind in _SEQUENCES.items() if isinstance(value, kind))
        return {name: [_encoded(item, parts) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key, parts), _encoded(item, parts)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        parts.append(bytes(value))
        return {"bytes": len(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (slice, range)):
        ends = [value.start, value.stop, value.step]
        return {type(value).__name__: [_encoded(one, parts) for one in ends]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        parts.append(value.tobytes())
        return {"array": [value.dtype.str, list(value.shape), value.nbytes]}
    return _encoded_of_torch(value, parts)


def _encoded_of_torch(value: Any, parts: list[bytes]) -> Any:
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo:
        together = value.detach().coalesce()
        return {"sparse": [_encoded(one, parts) for one in (together.indices(), together.values(), list(value.shape))]}
    is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
    if is_plain and not value.is_quantized:
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        parts.append(bytes_of(plain).numpy().tobytes())
        return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape), plain.nbytes]}
    kind = type(value)
    raise TypeError(f"ranks cannot tell each other a {kind.__module__}.{kind.__qualname__}")


def _decoded(value: Any, take: Callable[[int], bytes]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, take) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, held),) = value.items()
    if name in _SEQUENCES:
        return _SEQUENCES[name](_decoded(item, take) for item in held)
    if name == "dict":
        return {_decoded(key, take): _decoded(item, take) for key, item in held}
    if name == "bytes":
        return take(held)
    if name in ("slice", "range"):
        return (slice if name == "slice" else range)(*(_decoded(one, take) for one in held))
    if name == "number":
        return _decoded(held, take)[()]
    if name == "complex":
        return complex(*held)
    if name == "array":
        kind, shape, size = held
        return np.frombuffer(bytearray(take(size)), dtype=np.dtype(kind)).reshape(shape)
    return _decoded_of_torch(name, held, take)


def _decoded_of_torch(name: str, held: Any, take: Callable[[int], bytes]) -> Any:
    if name == "dtype":
        return _type(held)
    if name == "device":
        return torch.device(held)
    if name == "sparse":
        indices, values, shape = (_decoded(one, take) for one in held)
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()
    if name == "tensor":
        kind, shape, size = held
        if not size:
            return torch.empty(shape, dtype=_type(kind), device="cpu")
        return torch.frombuffer(bytearray(take(size)), dtype=torch.uint8).view(_type(kind)).view(shape)
    raise ValueError(f"a value of another rank is of an unknown kind, {name!r}")


def _type(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"a value of another rank has a type that torch has not, {name!r}")
    return found
