"""Tensors as a few numbers, samples as digests, any value as a flat list of numbers, sketches and texts."""

from __future__ import annotations

import functools
import hashlib
import numbers
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lagom.patching.dealing import num_samples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.verify.record import Sketch

_SIZE = 64
_CHUNK = 1 << 20


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> Sketch:
    """64 signed sums of the elements of ``tensor``, in float64; the elements themselves where there are no more."""
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
    signs = torch.randint(0, 2, (_CHUNK,), generator=generator, dtype=torch.int8)
    return (signs * 2 - 1).to(device, torch.float64)


def flat(value: Any, depth: int = 0) -> list[object]:
    """``value`` as a list: floats, sketches of tensors and arrays, and texts for what is neither."""
    if isinstance(value, torch.Tensor):
        if value.is_quantized or not value.numel():
            return [f"tensor of shape {tuple(value.shape)}"]
        return [f"{value.dtype} {tuple(value.shape)}", sketch(value)]
    if isinstance(value, bool) or value is None:
        return [repr(value)]
    if isinstance(value, numbers.Real):
        return [float(value)]
    if isinstance(value, str):
        return [value]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return flat(torch.from_numpy(numpy.ascontiguousarray(value).astype("float64")), depth)
    if depth > 8:
        return []
    if callable(getattr(value, "state_dict", None)):
        return [type(value).__name__, *flat(value.state_dict(), depth + 1)]
    if isinstance(value, Mapping):
        return [part for key, item in value.items() for part in (f"[{key!r}]", *flat(item, depth + 1))]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in flat(item, depth + 1)]
    return [f"a {type(value).__name__}"]


def digests(data: Any) -> tuple[bytes, ...]:
    """One for each sample of a batch: of its row in the tensors that have as many rows."""
    count = num_samples(data)
    hashes = [hashlib.blake2b(digest_size=8) for _ in range(count)]
    for tensor in _tensors(data):
        if tensor.dim() and len(tensor) == count and tensor.layout == torch.strided:
            rows = tensor.detach().cpu().contiguous().reshape(count, -1).view(torch.uint8).numpy()
            for row, digest in zip(rows, hashes, strict=True):
                digest.update(row.tobytes())
    return tuple(digest.digest() for digest in hashes)


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping):
        yield from _tensors(list(data.values()))
    elif isinstance(data, (tuple, list)):
        for part in data:
            yield from _tensors(part)
