"""Sketches of tensors, digests of samples, and ``flat``: any value as a list of numbers, sketches and texts."""

from __future__ import annotations

import functools
import hashlib
import numbers
from typing import TYPE_CHECKING, Any

import torch

from lagom.contents import entries, is_array, is_metrics, is_plain, is_tensor, name_of
from lagom.run_state.batch_contents import count_samples, tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.extensions.verify.on_rank.record import Sketch

_SIZE = 64
_CHUNK = 1 << 20
_DEEPEST = 100


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> Sketch:
    """Return 64 signed sums of the elements of ``tensor``, in float64; the elements if there are at most 64."""
    values = tensor.detach()
    if values.layout != torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.reshape(-1)
    if len(values) <= _SIZE:
        return tuple(values.to("cpu", torch.float64).tolist())
    total = torch.zeros(_SIZE, dtype=torch.float64, device=values.device)
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK].to(torch.float64)
        part = part * _signs(part.device)[: len(part)]
        part = torch.nn.functional.pad(part, (0, -len(part) % _SIZE))
        total += part.view(-1, _SIZE).sum(0)
    return tuple(total.tolist())


@functools.cache
def _signs(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    signs = torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.int8, device="cpu")
    return (signs * 2 - 1).to(device, torch.float64)


def flat(value: Any) -> list[object]:
    """Return ``value`` as a list, whatever its type.

    Types and places of parts are bytes; a place is empty, or begins with "[" or ".". A float of the program's own
    return value, which ``aggregate`` averages, is a float. Other fractional numbers, tensors and arrays of numbers are
    sketches, after a text with a digest of the places of non-finite numbers, if there are any. Whole numbers are ints,
    everything else a text.
    """
    return list(_flat(value, "", 0, True, set()))


def _flat(value: Any, place: str, depth: int, is_own: bool, met: set[int]) -> Iterator[object]:
    parts = entries(value)
    if parts is None:
        try:
            yield from list(_leaf(value, is_own))
        except (RuntimeError, TypeError, ValueError):  # some kinds of tensors have no readable numbers
            yield name_of(value)
        return
    yield f"{name_of(value)} of {len(parts)}".encode()
    if id(value) in met or depth > _DEEPEST:
        return
    met.add(id(value))
    is_own = is_own and is_plain(value) and (depth == 0 or is_metrics(value))
    for name, part in parts:
        yield (place + name).encode()
        yield from _flat(part, place + name, depth + 1, is_own, met)
    met.discard(id(value))


def _leaf(value: Any, is_own: bool) -> Iterator[object]:
    if is_tensor(value):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if value.numel() and not value.is_quantized and not value.is_meta:
            yield from _sketch_with_gaps(value.detach())
    elif is_array(value):
        yield f"{value.dtype} {value.shape}".encode()
        if value.dtype.kind in "biufc" and value.size:
            kind = "complex128" if value.dtype.kind == "c" else "float64"
            yield from _sketch_with_gaps(torch.from_numpy(value.astype(kind, order="C")))
        else:
            yield hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()
    elif isinstance(value, (int, numbers.Integral)) and not isinstance(value, bool):
        yield int(value)
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        yield float(value) if is_own else (float(value),)
    elif isinstance(value, numbers.Complex) and not isinstance(value, bool):
        yield (value.real, value.imag)
    elif isinstance(value, (str, bytes, bytearray, bool, type(None))) or type(value).__module__ == "numpy":
        yield value if isinstance(value, str) else repr(value)
    else:
        yield name_of(value)


def _sketch_with_gaps(tensor: torch.Tensor) -> Iterator[object]:
    """Yield a sketch of the finite numbers; if there are non-finite numbers, first yield a digest of their places."""
    values = tensor.to_dense() if tensor.layout != torch.strided else tensor
    if not (finite := values.isfinite()).all():
        gaps = torch.where(finite, 0, torch.where(values.isnan(), 1, torch.where(values.real > 0, 2, 3)))
        yield hashlib.blake2b(gaps.to("cpu", torch.uint8).contiguous().numpy().tobytes(), digest_size=8).hexdigest()
        values = torch.where(finite, values, torch.zeros_like(values))
    yield sketch(values)


def digests(data: Any) -> tuple[bytes, ...]:
    """Return a digest for each sample of a batch, over its row in all tensors that have a row for each sample.

    Tensors whose rows have no readable bytes (sparse, nested, without elements, on the meta device) do not count.
    """
    count = count_samples(data)
    hashes = [hashlib.blake2b(digest_size=8) for _ in range(count)]
    for tensor in _with_rows(data, count):
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
            rows = whole.reshape(count, -1).view(torch.uint8).numpy()
            for row, digest in zip(rows, hashes, strict=True):
                digest.update(row.tobytes())
    return tuple(digest.digest() for digest in hashes)


def row_shapes(data: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shape of one sample's row in each tensor of a batch that has a row for each sample."""
    return tuple(tuple(tensor.shape[1:]) for tensor in _with_rows(data, count_samples(data)))


def _with_rows(data: Any, count: int) -> Iterator[torch.Tensor]:
    for tensor in tensors(data):
        if not tensor.is_nested and tensor.dim() and len(tensor) == count:  # nested tensors have no len()
            yield tensor
