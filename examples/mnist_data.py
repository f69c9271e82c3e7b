"""Makes images of digits like MNIST's on this machine, without a download, and writes them in MNIST's file format.

python examples/mnist_data.py data                               # 60,000 training and 10,000 test images, 55 MB
python examples/mnist_data.py data --train 6000 --test 1000

``torchvision.datasets.MNIST("data", download=True)`` reads these files. So does the class ``MNIST`` below, without
torchvision.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

SIZE = 28
"""Pixels of an image's side."""
NUM_CLASSES = 10
_SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
"""The lit segments of a seven-segment display, by digit."""
_STROKES = {
    "a": (slice(5, 7), slice(9, 19)),
    "b": (slice(5, 15), slice(17, 19)),
    "c": (slice(13, 23), slice(17, 19)),
    "d": (slice(21, 23), slice(9, 19)),
    "e": (slice(13, 23), slice(9, 11)),
    "f": (slice(5, 15), slice(9, 11)),
    "g": (slice(13, 15), slice(9, 19)),
}
"""Rows and columns that each segment fills."""
_SHIFT = 3
"""Largest number of pixels by which a digit is moved, in either direction."""
_CHUNK = 10_000
"""Number of images that are made at a time."""

Bytes = npt.NDArray[np.uint8]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the files below the folder that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--train", type=int, default=60_000, metavar="N", help="training images")
    parser.add_argument("--test", type=int, default=10_000, metavar="N", help="test images")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print(write(Path(args.folder), args.train, args.test, args.seed))


def write(folder: Path, num_train: int = 60_000, num_test: int = 10_000, seed: int = 0) -> Path:
    """Write the training and test sets below ``folder``, where torchvision looks for them; return the files' folder.

    Equal arguments give equal files. Each file is renamed into place when it is complete, so several processes may
    write at once.
    """
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for name, num, part in (("train", num_train, 0), ("t10k", num_test, 1)):
        images, labels = digits(num, np.random.default_rng((seed, part)))
        _write_idx(raw / f"{name}-images-idx3-ubyte", images)
        _write_idx(raw / f"{name}-labels-idx1-ubyte", labels)
    return raw


def digits(num: int, random: np.random.Generator) -> tuple[Bytes, Bytes]:
    """Return images of shape (num, 28, 28) and their digits, shape (num,): random positions and shades, with noise."""
    labels = random.integers(0, NUM_CLASSES, num).astype(np.uint8)
    shifts = random.integers(-_SHIFT, _SHIFT + 1, (num, 2))
    shades = random.uniform(0.5, 1.0, num).astype(np.float32)
    moved = np.stack(
        [
            np.roll(shape, (down, right), (0, 1))
            for shape in _shapes()
            for down in range(-_SHIFT, _SHIFT + 1)
            for right in range(-_SHIFT, _SHIFT + 1)
        ]
    )
    width = 2 * _SHIFT + 1
    which = (labels.astype(np.int64) * width + shifts[:, 0] + _SHIFT) * width + shifts[:, 1] + _SHIFT
    images = np.empty((num, SIZE, SIZE), np.uint8)
    for start in range(0, num, _CHUNK):
        part = slice(start, start + _CHUNK)
        drawn = moved[which[part]] * shades[part, None, None]
        noise = random.normal(0.0, 0.1, drawn.shape).astype(np.float32)
        images[part] = np.clip((drawn + noise) * 255, 0, 255)
    return images, labels


def _shapes() -> npt.NDArray[np.float32]:
    shapes = np.zeros((NUM_CLASSES, SIZE, SIZE), np.float32)
    for shape, segments in zip(shapes, _SEGMENTS, strict=True):
        for segment in segments:
            shape[_STROKES[segment]] = 1.0
    return shapes


def _write_idx(path: Path, values: Bytes) -> None:
    """Write ``values`` in the IDX format of http://yann.lecun.com/exdb/mnist: a magic number, the shape, the bytes."""
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(header + values.tobytes())
    part.replace(path)


def read_idx(path: Path) -> Bytes:
    """Return the array of bytes in an IDX file.

    Raises:
        ValueError: if the file is not an IDX file of bytes.
    """
    found = path.read_bytes()
    num_dims = found[3]
    if found[:3] != bytes([0, 0, 8]):
        raise ValueError(f"{path} does not begin as an IDX file of bytes does: {found[:4].hex()}")
    shape = [int.from_bytes(found[4 * at : 4 * at + 4], "big") for at in range(1, num_dims + 1)]
    return np.frombuffer(found, np.uint8, offset=4 * num_dims + 4).reshape(shape)


class MNIST(Dataset[tuple[Any, int]]):
    """Replaces ``torchvision.datasets.MNIST`` where torchvision is not installed; images are float tensors.

    Args:
        root: the folder that was passed to ``write``.
        transform: function of an image, which is a tensor of shape (1, 28, 28) with values from 0 to 1.
        download: ignored; there for compatibility with torchvision.

    Raises:
        RuntimeError: if the files are missing.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        transform: Callable[[torch.Tensor], Any] | None = None,
        download: bool = False,
    ) -> None:
        del download
        raw = Path(root) / "MNIST" / "raw"
        name = "train" if train else "t10k"
        if not raw.is_dir():
            raise RuntimeError(f"there is no {raw}; make it with: python examples/mnist_data.py {root}")
        self.data = torch.from_numpy(read_idx(raw / f"{name}-images-idx3-ubyte").copy())
        self.targets = torch.from_numpy(read_idx(raw / f"{name}-labels-idx1-ubyte").astype(np.int64))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image: Any = self.data[index].unsqueeze(0).float() / 255
        return (image if self.transform is None else self.transform(image)), int(self.targets[index])


if __name__ == "__main__":
    main()
