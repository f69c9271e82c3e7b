"""Digests of samples, compared now and then to check that a data set gives the same samples on all ranks."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lagom.errors import DivergenceError
from lagom.exchange.agreement_exchange import signature

if TYPE_CHECKING:
    from lagom.run_state.loader_pass import LoaderPass
    from lagom.session.session import Session

_ELEMENTS = 256
"""Least number of elements that are hashed of a larger tensor, at equal distances."""
_PARTS = 64
"""Number of items that are hashed of a tuple, list or dict: the first ones."""
_INTERVAL = 100
_PLACE = "a batch of an iterable data set"


def digest(sample: Any, *, exact: bool = False) -> bytes:
    """Return a digest of ``sample`` that is equal on all ranks that have equal samples.

    Tensors, arrays, numbers and text count, in tuples, lists and dicts. Sparse, nested and quantized tensors count by
    their type only. So do other objects, whose contents may belong to this process: paths, times, the order of a set.
    Of a container the first 64 items count, and of a large tensor some elements. Floating-point numbers count with 3
    digits, since two kinds of processors may decode an image differently; of a floating-point tensor only the mean,
    first and last magnitudes count. The digest of a pair of tensors takes 10 microseconds.

    Args:
        exact: all items of containers, all digits and all elements count. Of the order of elements only some changes
            show, since elements are summed.
    """
    hasher = hashlib.blake2b(digest_size=8)
    _add_value(hasher, sample, exact)
    return hasher.digest()


class SampleComparison:
    """Compares the ranks' batches of an iterable data set after 1, 2, 4, ... 128 batches, then every 100 batches.

    In the main thread a comparison is a collective. In a thread, rank 0 publishes its digest, and each other rank
    compares.
    """

    def __init__(self, session: Session, current: LoaderPass) -> None:
        self._session = session
        self._current = current
        self._seen = hashlib.blake2b(digest_size=8)
        self._count = 0
        self._next = 1

    def add_batch(self, digest: bytes) -> None:
        """Add the digest of the next batch.

        Raises:
            DivergenceError: on all ranks, when they saw different batches; in a thread, on each rank that saw others
                than rank 0.
        """
        self._seen.update(digest)
        self._count += 1
        if self._count >= self._next:
            self._next += min(self._count, _INTERVAL)
            self._compare(self._seen.digest())

    def finish(self) -> None:
        """Compare the ranks at the end of the pass.

        Raises:
            DivergenceError: unless all ranks have ended after the same batches; on the ranks named in ``add_batch``.
        """
        self._compare(b"end" + self._seen.digest())

    def _compare(self, seen: bytes) -> None:
        session = self._session
        if not session.may_meet:
            published = self._current.published
            if published is not None and published.agree(seen) != seen:
                raise DivergenceError(_DIFFERENT)
            return
        assert session.backwards.agreement is not None
        assert session.backwards.divergence is not None
        if not session.backwards.agreement.exchange(signature(_PLACE.encode() + seen)):
            session.backwards.divergence.find_divergence(_PLACE)
            raise DivergenceError(_DIFFERENT)


_DIFFERENT = (
    "an iterable data set gives other samples on other ranks, but lagom deals them out, which takes the same ones "
    "everywhere. Where it draws random numbers, draw them from torch's, numpy's or random's global generator, "
    "which lagom starts equal on all ranks, or give its own generator a fixed seed; have as many workers on every "
    "rank. If it gives every rank a part of the data on purpose, say so: set lagom_sharded = True on the data set"
)


def _add_value(digest: Any, value: Any, exact: bool) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        is_plain = value.layout == torch.strided and not value.is_nested and not value.is_quantized
        if is_plain and value.device.type != "meta":
            if exact:
                whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
                _add_bytes(digest, str(value.dtype), whole.reshape(-1).view(torch.uint8).numpy())
            flat = _take_some(value.detach().reshape(-1)).cpu()
            _add_numbers(
                digest, value.shape, (flat.double() if flat.is_floating_point() else flat.resolve_conj()).numpy()
            )
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            if exact:
                _add_bytes(digest, str(value.dtype), np.ascontiguousarray(value).reshape(-1).view(np.uint8))
            _add_numbers(digest, value.shape, _take_some(value.reshape(-1)))
    elif isinstance(value, bool | int | str | bytes):
        digest.update(repr(value).encode())
    elif isinstance(value, float | complex):
        digest.update((repr(value) if exact else f"{value:.3g}").encode())
    elif isinstance(value, np.generic):
        _add_value(digest, value.item(), exact)
    elif isinstance(value, dict):
        for key in list(value)[: None if exact else _PARTS]:
            _add_value(digest, key, exact)
            _add_value(digest, value[key], exact)
    elif isinstance(value, tuple | list):
        digest.update(str(len(value)).encode())
        for part in value[: None if exact else _PARTS]:
            _add_value(digest, part, exact)


def _add_bytes(digest: Any, kind: str, flat: np.ndarray[Any, Any]) -> None:
    """Add the sum of the 8-byte words of each half of a tensor, so that exchanged halves give another digest."""
    words = flat[: len(flat) // 8 * 8].view(np.uint64)
    digest.update(kind.encode() + flat[len(words) * 8 :].tobytes())
    for half in (words[: len(words) // 2], words[len(words) // 2 :]):
        digest.update(np.add.reduce(half, dtype=np.uint64).tobytes())


def _take_some(flat: Any) -> Any:
    return flat[:: len(flat) // _ELEMENTS] if len(flat) > _ELEMENTS else flat


def _add_numbers(digest: Any, shape: tuple[int, ...], part: np.ndarray[Any, Any]) -> None:
    digest.update(repr(tuple(shape)).encode())
    if part.size and part.dtype.kind in "fc":
        magnitudes = np.abs(part)
        digest.update(b"%.2e %.2e %.2e" % (magnitudes.mean(dtype=float), magnitudes[0], magnitudes[-1]))
    else:
        digest.update(part.tobytes())
