"""``AdasumSteps``: each rank steps by its own gradients, and what the steps changed is added up adaptively."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lagom.compat.horovod import operations
from lagom.compat.horovod.asking import Adasum
from lagom.compat.horovod.operations import synchronize
from lagom.compat.horovod.optimizer import Counted


class AdasumSteps(Counted):
    """Parameters become what they were, and the adaptive sum of what each rank's own step would change."""

    def _begin(self) -> None:
        self._computed: set[Tensor] = set()
        super()._begin()

    def _restart(self) -> None:
        self._computed = set()
        super()._restart()

    def _ready(self, parameter: Tensor) -> None:
        self._computed.add(parameter)

    def synchronize(self) -> None:
        """Gradients stay the rank's own: there is nothing to wait for."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not to be had: ``step`` itself exchanges what it changes."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and add up what that changes with the other ranks'."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hook()
        before = {parameter: parameter.detach().clone() for parameter in self._hooked}
        super().step()  # type: ignore[misc]
        asked = []
        with torch.no_grad():
            for parameter, start in before.items():
                sent, context = self._compression.compress(parameter - start)
                handle = operations.allreduce_async(sent, name=self._names[parameter], op=Adasum)
                asked.append((parameter, start, handle, context))
            for parameter, start, handle, context in asked:
                parameter.copy_(start + self._compression.decompress(synchronize(handle), context))
        self._restart()
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's, which must not be between a backward and its step."""
        self._refuse_zero(any(self._left[parameter] <= 0 for parameter in self._computed))
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
