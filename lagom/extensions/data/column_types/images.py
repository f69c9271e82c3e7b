"""Decodes images one by one with OpenCV, or with pillow if OpenCV is not installed."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

from lagom.errors import LagomError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def decode(cell: Any) -> NDArray[Any]:
    """Decode an image into an array of shape ``(height, width, 3)`` (RGB), or ``(height, width)`` if it is grey.

    Raises:
        LagomError: if neither OpenCV nor pillow is installed.
        ValueError: if the image is damaged, or has another number of channels.
        OSError: if the image is damaged, and decoded by pillow.
    """
    try:
        import cv2
    except ImportError:
        return decode_by_pillow(cell)
    image = cv2.imdecode(np.frombuffer(cell, np.uint8), cv2.IMREAD_UNCHANGED)
    if image is None:
        raise ValueError("no image, or a damaged one")
    if image.ndim == 3 and image.shape[2] != 3:
        raise ValueError(f"an image of {image.shape[2]} channels")
    colours: NDArray[Any] = image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return colours


def decode_by_pillow(cell: Any) -> NDArray[Any]:
    """Decode an image as ``decode`` does, without OpenCV.

    Raises:
        LagomError: if pillow is not installed.
        ValueError: for a PNG with 16 bits a colour, and for other modes than grey and RGB.
        OSError: if the image is damaged.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise LagomError(
            "images are decoded by OpenCV or pillow, and neither is installed here: "
            "pip install opencv-python-headless (or pillow, which takes longer)"
        ) from error
    content = bytes(cell)
    # Pillow silently keeps 8 of 16 bits in images with colours.
    if content[:4] == b"\x89PNG" and content[24] == 16 and content[25] != 0:
        raise ValueError("a PNG of 16 bits a colour needs opencv: pip install opencv-python-headless")
    with Image.open(io.BytesIO(content)) as opened:
        if opened.mode not in ("L", "RGB", "I;16", "I"):
            raise ValueError(f"an image of the mode {opened.mode}")
        image = np.array(opened)
    return image.astype(np.uint16) if image.dtype == np.int32 else image
