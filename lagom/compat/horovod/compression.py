"""What gradients are made of on their way between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """What a program's own compression derives from."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What is sent, and what ``decompress`` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """What came, as it was."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """As it is."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor itself."""
        del ctx
        return tensor


class FP16Compressor(Compressor):
    """Floating-point numbers of 16 bits on the way; sums of them are of 16 bits, too, as Horovod's are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Half precision, if it is of floating point."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The precision that it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressions that there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
