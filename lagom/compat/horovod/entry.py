"""``Entry``: a request of this rank's, with its tensor and, later, what came of it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from lagom.compat.horovod.matching import Request
from lagom.monitor.spans import activity


class Entry:
    """One exchange that the program has asked for.

    Args:
        tensor: what goes in; an empty one for a barrier.
        in_place: the result goes there, too.
    """

    __slots__ = (
        "_negotiation",
        "done",
        "error",
        "given",
        "in_place",
        "received",
        "request",
        "result",
        "taken",
        "tensor",
    )

    def __init__(self, request: Request, tensor: Tensor, in_place: bool = False) -> None:
        self.request = request
        self.tensor = tensor
        self.in_place = in_place
        self.result: Tensor | None = None
        self.received: list[int] = []
        """Rows from each rank, of an alltoall."""
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.given: Any = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        """On a GPU, when the input is computed."""
        self.taken: Any = None
        """On a GPU, when the result is there."""
        # In the timeline, a row for each tensor, in the words of Horovod's.
        self._negotiation = activity(request.name, f"NEGOTIATE_{request.kind.upper()}")
        self._negotiation.__enter__()

    def negotiated(self) -> None:
        """All ranks have asked for it."""
        self._negotiation.__exit__(None, None, None)

    def fill(self, result: Tensor) -> None:
        """It is done, and this came of it."""
        if self.in_place:
            # As Horovod writes: past autograd, which has nothing to remember of it.
            self.tensor.data.copy_(result)
            self.result = self.tensor
        else:
            self.result = result.to(self.tensor.device)

    def settle(self) -> None:
        """Have the program's stream wait for the result."""
        if self.taken is not None:
            stream = torch.cuda.current_stream(self.tensor.device)
            stream.wait_event(self.taken)
            if self.result is not None:
                self.result.record_stream(stream)
