"""``hvd.Compression``: the data types in which gradients travel between ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, float16


class Compressor:
    """Base class for a program's own compression; by itself it changes nothing."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context that ``decompress`` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Convert a received tensor back."""
        del ctx
        return tensor


NoneCompressor = Compressor


class FP16Compressor(Compressor):
    """Sends floating-point numbers as 16 bits. Sums are computed in 16 bits too, as in Horovod."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Convert floating-point numbers to half precision."""
        return (tensor.to(float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Convert the numbers back to their former precision."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """Offers the compressions that a program may choose: ``none`` and ``fp16``."""

    none = NoneCompressor
    fp16 = FP16Compressor
