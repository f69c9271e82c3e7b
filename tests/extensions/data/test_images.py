"""Images: OpenCV and pillow give what was encoded, whichever of them is installed."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from lagom.errors import LagomError
from lagom.extensions.data.column_types import images
from lagom.extensions.data.column_types.petastorm_codecs import CellByCell, Decoder, codec
from lagom.extensions.data.column_types.unischema import UnischemaField


def encoded(pixels: NDArray[Any], kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def pixels_of(*shape: int, dtype: Any = np.uint8) -> NDArray[Any]:
    return np.random.default_rng(sum(shape)).integers(0, np.iinfo(dtype).max, shape, dtype)


@pytest.mark.parametrize("decode", [images.decode, images.decode_by_pillow])
def test_images_are_what_was_encoded(decode: Callable[[Any], NDArray[Any]]) -> None:
    if decode is images.decode:
        pytest.importorskip("cv2")
    for pixels in (pixels_of(5, 7), pixels_of(7, 5, 3), pixels_of(4, 6, dtype=np.uint16)):
        found = decode(encoded(pixels))
        assert found.dtype == pixels.dtype
        assert np.array_equal(found, pixels)
    assert np.array_equal(decode(encoded(pixels_of(9, 8, 3), "BMP")), pixels_of(9, 8, 3))
    see_through = encoded(pixels_of(5, 7, 4))
    for wrong in (b"no image", encoded(pixels_of(40, 30, 3))[:500], see_through):
        with pytest.raises((ValueError, OSError, SyntaxError, IndexError)):
            decode(wrong)


@pytest.mark.parametrize("size", [8, 150])
def test_nulls_and_other_formats_come_between(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    wanted = [pixels_of(size, size, 3) + np.uint8(n) for n in range(20)]
    cells = [encoded(one, "BMP" if number == 3 else "PNG") for number, one in enumerate(wanted)]
    whole = pa.array(cells, pa.large_binary())
    # What lies under a null may be anything.
    valid = np.packbits(np.arange(20) != 1, bitorder="little")
    array = pa.Array.from_buffers(pa.large_binary(), 20, [pa.py_buffer(valid), *whole.buffers()[1:]])
    found = codec(UnischemaField("x", np.dtype(np.uint8), (size, size, 3), "CompressedImageCodec", True), "error")
    assert isinstance(found, CellByCell)
    nowhere: Any = None
    made = Decoder(found, ("x",), nowhere)(array.slice(1), np.arange(19))
    assert made.cells[0] is None
    assert np.array_equal(np.stack([one for one in made.cells if one is not None]), wanted[2:])


def test_without_a_decoder_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = pa.array([encoded(pixels_of(8, 8))])
    monkeypatch.setitem(sys.modules, "cv2", None)
    monkeypatch.setitem(sys.modules, "PIL", None)
    found = codec(UnischemaField("x", np.dtype(np.uint8), (8, 8), "CompressedImageCodec", True), "error")
    assert isinstance(found, CellByCell)
    nowhere: Any = None
    with pytest.raises(LagomError, match="pip install opencv-python-headless"):
        Decoder(found, ("x",), nowhere)(cells, np.arange(1))
