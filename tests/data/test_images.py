"""lagom's own decoder of PNGs, judged by zlib, by pillow and by an encoder that follows the specification."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from PIL import Image

from lagom.collectives import native
from lagom.data.columns.images import Size, image, pngs
from lagom.data.columns.petastorm_codecs import CellByCell, Decoder, codec
from lagom.data.columns.unischema import UnischemaField

needs_native = pytest.mark.skipif(native.native() is None, reason="lagom was built without a compiler")


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(pixels: NDArray[np.uint8], drawn: random.Random, between: bytes = b"") -> bytes:
    """``pixels`` as a PNG: each line with another filter, deflated in a way that is drawn, in chunks of any size."""
    height, width = pixels.shape[:2]
    lines = pixels.reshape(height, -1).astype(np.int64)
    step = pixels[0, 0].size
    raw = b""
    for row, line in enumerate(lines):
        above = lines[row - 1] if row else np.zeros_like(line)
        left, corner = (np.concatenate([np.zeros(step, np.int64), one])[: len(line)] for one in (line, above))
        guess = left + above - corner
        distances = np.abs(np.stack([left, above, corner]) - guess)
        paeth = np.choose(distances.argmin(0), [left, above, corner])  # the first of equals, as is specified
        kind = drawn.randrange(5)
        raw += (
            bytes([kind])
            + ((line - [0 * line, left, above, (left + above) // 2, paeth][kind]) % 256).astype(np.uint8).tobytes()
        )
    deflate = zlib.compressobj(drawn.randrange(10), zlib.DEFLATED, drawn.choice([9, 12, 15]), 8, drawn.randrange(5))
    cut = drawn.randrange(len(raw) + 1)
    data = deflate.compress(raw[:cut]) + deflate.flush(drawn.choice([zlib.Z_NO_FLUSH, zlib.Z_FULL_FLUSH]))
    data += deflate.compress(raw[cut:]) + deflate.flush()
    size = drawn.choice([7, 100, len(data)])
    parts = b"".join(chunk(b"IDAT", data[place : place + size]) for place in range(0, len(data), size))
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if pixels.ndim == 2 else 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + between + parts + chunk(b"IEND", b"")


def pixels_of(drawn: random.Random, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    numbers = np.random.default_rng(drawn.getrandbits(32))
    kind = drawn.randrange(3)
    if kind == 0:
        return numbers.integers(0, 256, shape, np.uint8)
    smooth = np.cumsum(numbers.integers(-2, 3, shape), axis=1)
    return (smooth if kind == 1 else np.zeros(shape)).astype(np.uint8)


def decoded(cells: list[bytes], shape: tuple[int, ...]) -> tuple[NDArray[np.uint8], list[bool]]:
    offsets = np.cumsum([0, *map(len, cells)]).astype(np.int64)
    size = Size(shape[0], shape[1], 3 if len(shape) == 3 else 1, shape)
    found, is_done = pngs(np.frombuffer(b"".join(cells), np.uint8), offsets, size)
    return found, is_done.tolist()


def deflated_by_pillow(pixels: NDArray[Any], **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", **options)
    return out.getvalue()


@needs_native
def test_images_are_what_was_encoded() -> None:
    drawn = random.Random(0)
    for _ in range(150):
        shape = (drawn.randrange(1, 40), drawn.randrange(1, 40), *drawn.choice([(), (3,)]))
        wanted = [pixels_of(drawn, shape) for _ in range(3)]
        text = chunk(b"tEXt", b"Comment\0hello")
        cells = [png(wanted[0], drawn), png(wanted[1], drawn, text), deflated_by_pillow(wanted[2], optimize=True)]
        found, is_done = decoded(cells, shape)
        assert is_done == [True] * 3
        assert np.array_equal(found, wanted)
        assert all(np.array_equal(image(cell), one) for cell, one in zip(cells, wanted, strict=True))


@needs_native
def test_a_damaged_image_is_left_to_who_says_what_is_wrong() -> None:
    drawn = random.Random(1)
    whole = pixels_of(drawn, (9, 8, 3))
    content = png(whole, drawn)
    damaged = [content[:size] for size in range(len(content))]
    for place in range(len(content)):
        other = bytearray(content)
        other[place] ^= 1 << drawn.randrange(8)
        damaged.append(bytes(other))
    assert decoded(damaged, (9, 8, 3))[1] == [False] * len(damaged)
    # The last byte of what was deflated, with a sum over the chunk that is right: Adler's sum is looked at too.
    data = bytearray(zlib.compress(bytes(9 * 25)))
    data[-1] ^= 1
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 9, 8, 2, 0, 0, 0))
    wrong_sum = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", bytes(data)) + chunk(b"IEND", b"")
    assert decoded([wrong_sum], (9, 8, 3))[1] == [False]


@needs_native
def test_whatever_is_no_plain_image_of_that_size_is_left_to_other_decoders() -> None:
    drawn = random.Random(2)
    colours = pixels_of(drawn, (8, 8, 3))
    photograph = io.BytesIO()
    Image.fromarray(colours).save(photograph, "JPEG")
    others = [
        b"",
        photograph.getvalue(),
        png(colours[:7], drawn),
        png(colours[:, :, 0].copy(), drawn),
        png(colours, drawn, chunk(b"tRNS", bytes(6))),
        png(colours, drawn, chunk(b"PLTE", bytes(6))),
        png(colours, drawn, chunk(b"acTL", bytes(8))),
        deflated_by_pillow(np.dstack([colours, colours[:, :, :1]])),
        deflated_by_pillow(colours[:, :, 0].astype(np.uint16)),
    ]
    assert decoded(others, (8, 8, 3))[1] == [False] * len(others)
    # An image of 4 GB that a few bytes promise is not made room for.
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0))
    bomb = np.frombuffer(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", b"x" * 9) + chunk(b"IEND", b""), np.uint8)
    out, done = np.zeros(1, np.uint8), np.ones(1, bool)
    offsets = np.array([0, len(bomb)])
    places = bomb.ctypes.data, offsets.ctypes.data, 1
    native.native().decode_pngs(*places, 40000, 40000, 3, out.ctypes.data, done.ctypes.data)
    assert done.tolist() == [False]


def test_nulls_and_photographs_come_between() -> None:
    drawn = random.Random(3)
    wanted = [pixels_of(drawn, (8, 8, 3)) for _ in range(40)]
    cells = [png(one, drawn) for one in wanted]
    cells[2] = deflated_by_pillow(wanted[2])
    photograph = io.BytesIO()
    Image.fromarray(wanted[3]).save(photograph, "BMP")
    cells[3] = photograph.getvalue()
    whole = pa.array(cells, pa.large_binary())
    # What lies under a null may be anything.
    valid = np.packbits(np.arange(40) != 1, bitorder="little")
    array = pa.Array.from_buffers(pa.large_binary(), 40, [pa.py_buffer(valid), *whole.buffers()[1:]])
    found = codec(UnischemaField("x", np.dtype(np.uint8), (8, 8, 3), "CompressedImageCodec", True), "error")
    assert isinstance(found, CellByCell)
    nowhere: Any = None
    made = Decoder(found, ("x",), nowhere)(array.slice(1), np.arange(39))
    assert made.cells[0] is None
    assert np.array_equal(np.stack([one for one in made.cells if one is not None]), wanted[2:])


def test_without_the_compiled_part_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "native", lambda: None)
    assert decoded([b"", b""], (8, 8))[1] == [False, False]
