"""``DistributedOptimizer``: an optimizer whose steps take the gradients of all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lagom.extensions.compat.horovod import topology
from lagom.extensions.compat.horovod.asynchronous import (
    Adasum,
    Average,
    allreduce_async,
    allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from lagom.extensions.compat.horovod.compression import Compression
from lagom.extensions.compat.horovod.process_sets import ProcessSet, global_process_set


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer with the state of ``optimizer`` and a class derived from its class.

    Args:
        named_parameters: the result of ``model.named_parameters()``; ranks match gradients by these names.
        compression: ``Compression.none``, ``Compression.fp16`` or the program's own ``Compressor``.
        backward_passes_per_step: number of backwards whose gradients add up before they are reduced.
        op: ``Average``, ``Sum``, or ``Adasum``, which reduces the changes of a step instead of the gradients.
        gradient_predivide_factor: divides gradients before the sum; the rest of the division comes after it.
        num_groups: older spelling of ``groups``.
        groups: a number, or lists of the parameters whose gradients are to travel together; only checked, since all
            gradients that are ready travel together.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks that reduce.

    Raises:
        ValueError: for parameters without a name, names that are not unique, settings that do not go together, or LBFGS
            on several ranks.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor is {gradient_predivide_factor}, which wants op=hvd.Average")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; want 1 or more")
    _check(optimizer, groups if groups is not None else num_groups)
    mixin: Any = _AdasumMixin if op == Adasum and topology.size() > 1 else _ReducingMixin
    kind = type(type(optimizer).__name__, (mixin, type(optimizer)), {"__module__": __name__})
    wrapped: Any = object.__new__(kind)
    # A scheduler sets a bound ``step`` as attribute of its optimizer, which would bypass the ``step`` of the mixin.
    vars(wrapped).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    wrapped._parameter_names = _name_parameters(optimizer, named_parameters)
    wrapped._compression = compression
    wrapped.backward_passes_per_step = backward_passes_per_step
    wrapped.op = op
    wrapped.gradient_predivide_factor = gradient_predivide_factor
    wrapped.sparse_as_dense = sparse_as_dense
    wrapped.process_set = process_set
    wrapped._hooked = {}
    wrapped._should_synchronize = True
    wrapped._restart()
    wrapped._add_hooks()
    return wrapped


def _name_parameters(optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    groups = [group["params"] for group in optimizer.param_groups]
    places = [(number, place, one) for number, group in enumerate(groups) for place, one in enumerate(group)]
    unnamed = [(f"allreduce.noname.{number}.{place}", parameter) for number, place, parameter in places]
    pairs = unnamed if given is None else list(given)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = [name for name, num in Counter(name for name, _ in pairs).items() if num > 1]
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    names = {parameter: name for name, parameter in pairs}
    missing = [place for place in places if place[2] not in names]
    if missing:
        number, place, parameter = missing[0]
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: {len(missing)} of them, "
            f"first number {place} of group {number}, of shape {list(parameter.shape)}"
        )
    return names


def _check(optimizer: torch.optim.Optimizer, groups: Any) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and topology.size() > 1:
        raise ValueError(
            "LBFGS goes by the loss, which is each rank's own, so ranks would part; take a lagom run without Horovod "
            "(batches='whole'), or another optimizer"
        )
    if isinstance(groups, int) and groups >= 0:
        return
    if not isinstance(groups, list):
        raise ValueError(f"groups is {groups!r}; want a number, 0 or more, or a list of lists of torch.Tensor")
    seen: set[int] = set()
    for one in (one for group in groups for one in group):
        if not isinstance(one, Tensor):
            raise ValueError(f"groups must consist of torch.Tensor, and has a {type(one).__name__}")
        if id(one) in seen:
            raise ValueError("a parameter can only appear once in groups")
        seen.add(id(one))


class _ReducingMixin:
    """Starts to reduce gradients as they become final, and waits for them before the step."""

    param_groups: list[dict[str, Any]]
    backward_passes_per_step: int
    op: str
    gradient_predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet
    _parameter_names: dict[Tensor, str]
    _compression: Any
    _hooked: dict[Tensor, Any]
    _should_synchronize: bool

    def _restart(self) -> None:
        self._passes_left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        self._under_way: dict[Tensor, Callable[[], None] | None] = {}
        """For each parameter, the function that waits for and stores its gradient; None while backwards are missing."""
        self._has_synchronized = False

    def _add_hooks(self) -> None:
        """Watch the gradients of all trained parameters, including parameters that were added since the last call."""
        if topology.size() == 1 or not self.process_set.included():
            return
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            if parameter.requires_grad and parameter not in self._hooked:
                self._parameter_names.setdefault(parameter, f"allreduce.noname.added.{len(self._parameter_names)}")
                self._passes_left.setdefault(parameter, self.backward_passes_per_step)
                self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(self._count_pass)

    def _count_pass(self, parameter: Tensor) -> None:
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._passes_left[parameter] -= 1
        self._record_gradient(parameter)

    def _record_gradient(self, parameter: Tensor) -> None:
        self._under_way[parameter] = None if self._passes_left[parameter] else self._start_reducing(parameter)

    def _start_reducing(self, parameter: Tensor) -> Callable[[], None]:
        name = self._parameter_names[parameter]
        if parameter.grad is None:
            # Other ranks may have a gradient: the parameters that a forward uses may depend on its data.
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if grad.is_sparse and not self.sparse_as_dense:
            wait = sparse_allreduce_async(grad, name, self.op, self.process_set)

            def store_sparse() -> None:
                parameter.grad = wait()

            return store_sparse
        sent, context = self._compression.compress(grad.to_dense() if grad.is_sparse else grad)
        factor = self.gradient_predivide_factor  # 1 unless op is Average
        factors = {"prescale_factor": 1.0 / factor, "postscale_factor": factor}
        handle = allreduce_async_(sent, name=name, op=self.op, process_set=self.process_set, **factors)

        def store() -> None:
            synchronize(handle)
            reduced = self._compression.decompress(sent, context)
            if grad.is_sparse:
                parameter.grad = reduced.to_sparse()
            elif reduced is not grad:
                grad.copy_(reduced)

        return store

    def synchronize(self) -> None:
        """Wait until gradients are those of all ranks; a gradient that this rank lacks counts as zeros."""
        self._add_hooks()
        for parameter in self._hooked:
            if self._under_way.get(parameter) is None:
                self._under_way[parameter] = self._start_reducing(parameter)
        try:
            with torch.no_grad():
                for parameter, store in self._under_way.items():
                    assert store is not None
                    store()
                    self._passes_left[parameter] = self.backward_passes_per_step
        finally:
            self._under_way = {}
        self._has_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step`` use the gradients as they are, for example after ``synchronize`` and clipping."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, unless inside ``skip_synchronize``, and step.

        With a ``closure``, synchronize after each call of the closure instead.
        """
        if self._should_synchronize and closure is None:
            if self._has_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._has_synchronized = False
        if closure is None:
            return super().step()  # type: ignore[misc]

        def synchronized() -> Any:
            with torch.enable_grad():
                loss = closure()
            if self._should_synchronize:
                self.synchronize()
                self._has_synchronized = False
            return loss

        return super().step(synchronized)  # type: ignore[misc]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backwards before gradients are reduced."""
        self.backward_passes_per_step = passes
        self._restart()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state; gradients that are under way are forgotten."""
        self._restart()
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients.

        Raises:
            AssertionError: between a backward and the ``step`` or ``synchronize`` after it.
        """
        if self._under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]


class _AdasumMixin(_ReducingMixin):
    """Steps by this rank's own gradients, and adds the adaptive sum of all ranks' changes to the parameters."""

    def _record_gradient(self, parameter: Tensor) -> None:
        if not self._passes_left[parameter]:
            self._under_way[parameter] = None

    def synchronize(self) -> None:
        """Do nothing: gradients stay the rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise: ``step`` itself exchanges."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and combine the changes with those of the other ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._add_hooks()
        before = {parameter: parameter.detach().clone() for parameter in self._hooked}
        super().step()
        handles = []
        with torch.no_grad():
            for parameter, start in before.items():
                sent, context = self._compression.compress(parameter - start)
                settings = {"name": self._parameter_names[parameter], "op": Adasum, "process_set": self.process_set}
                handles.append((parameter, start, allreduce_async(sent, **settings), context))
            for parameter, start, handle, context in handles:
                parameter.copy_(start + self._compression.decompress(synchronize(handle), context))
        self._restart()
        return loss
