"""Images: small PNGs many at once by lagom's own decoder, all others one by one by opencv or pillow."""

from __future__ import annotations

import io
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lagom.data.columns.unischema import UnischemaField


class Size(NamedTuple):
    """Of images of 8 bits that all have it."""

    height: int
    width: int
    channels: int
    """1 or 3."""
    shape: tuple[int, ...]


def size(field: UnischemaField) -> Size | None:
    """That of the images of a column, where they have one and ``pngs`` may know them."""
    shape = tuple(length for length in field.shape if length)
    if field.dtype != np.uint8 or len(shape) != len(field.shape) or shape[2:] not in ((), (3,)) or len(shape) < 2:
        return None
    return Size(shape[0], shape[1], prod(shape[2:]), shape) if max(shape) < 1 << 31 else None


def pngs(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], size: Size
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Decode those cells of ``data`` that are plain PNGs of that size, with no other thread waiting meanwhile.

    Returns:
        An array of ``(cells, *size.shape)``, and which of its rows are images. Others are to be decoded by ``image``,
        which also says what is wrong with them.
    """
    from lagom.collectives.native import native

    count = len(offsets) - 1
    decode = getattr(native(), "decode_pngs", None)
    if decode is None:
        return np.empty((0, *size.shape), np.uint8), np.zeros(count, bool)
    assert offsets[0] >= 0
    assert offsets[-1] <= len(data)
    assert (np.diff(offsets) >= 0).all()
    offsets = np.ascontiguousarray(offsets)
    found, is_done = np.empty((count, *size.shape), np.uint8), np.empty(count, bool)
    places = data.ctypes.data, offsets.ctypes.data, count
    decode(*places, size.height, size.width, size.channels, found.ctypes.data, is_done.ctypes.data)
    return found, is_done


def image(cell: Any) -> NDArray[Any]:
    """An encoded image as an array: height, width, and red, green and blue unless it is grey."""
    try:
        import cv2
    except ImportError:
        return _by_pillow(cell)
    found = cv2.imdecode(np.frombuffer(cell, np.uint8), cv2.IMREAD_UNCHANGED)
    if found is None:
        raise ValueError("no image, or a damaged one")
    if found.ndim == 3 and found.shape[2] != 3:
        raise ValueError(f"an image of {found.shape[2]} channels")
    colours: NDArray[Any] = found if found.ndim == 2 else cv2.cvtColor(found, cv2.COLOR_BGR2RGB)
    return colours


def _by_pillow(cell: Any) -> NDArray[Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("images need pillow or opencv: pip install pillow") from error
    content = bytes(cell)
    # Of 16 bits and three colours pillow silently keeps 8.
    if content[:4] == b"\x89PNG" and content[24] == 16 and content[25] != 0:
        raise ValueError("a PNG of 16 bits a colour needs opencv: pip install opencv-python-headless")
    with Image.open(io.BytesIO(content)) as opened:
        if opened.mode not in ("L", "RGB", "I;16", "I"):
            raise ValueError(f"an image of the mode {opened.mode}")
        found = np.array(opened)
    return found.astype(np.uint16) if found.dtype == np.int32 else found


# Note [PNGs of our own]
#
# Petastorm writes images as PNGs, small ones above all: 32 by 32 pixels are 0.9 KB. Opencv takes 21 us of processor
# time for one, pillow 43, and both ask for the interpreter between images, so that threads wait for each other.
# `csrc/png.cpp` takes 12 us, most of it for inflating (`csrc/inflate.cpp`, which needs no library; zlib takes 11 for
# that), and gives the interpreter away once for some hundred images. It knows the plain kind only, of 8 bits, grey or
# RGB. Whatever else there is, or is wrong, is left to the others, so that what is read, and what is an error, does not
# depend on it.
