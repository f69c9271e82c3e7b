"""``DistributedOptimizer``: an optimizer whose steps take the gradients of all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lagom.compat.horovod import operations, world
from lagom.compat.horovod.asking import Adasum, Average, check_adasum
from lagom.compat.horovod.compression import Compression
from lagom.compat.horovod.operations import synchronize
from lagom.compat.horovod.process_sets import ProcessSet, global_process_set

Named = dict[Tensor, str]


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
    """``optimizer``, of a class derived from its own, with its state, whose steps take the gradients of all ranks.

    Args:
        named_parameters: as of ``model.named_parameters()``; ranks find each other's gradients by these names.
        compression: what gradients are on their way.
        backward_passes_per_step: whose gradients add up before they are reduced.
        op: ``Average``, ``Sum``, or ``Adasum``, which takes what a step changes in place of the gradients.
        gradient_predivide_factor: gradients are divided by it before the sum, and by the rest after it.
        num_groups: as ``groups``, older.
        groups: which gradients travel together; those that are ready do anyway, so it changes nothing here.
        sparse_as_dense: sparse gradients travel as dense ones.
        process_set: whose gradients.

    Raises:
        ValueError: for parameters without a name, names that are not unique, or settings that do not go together.
    """
    size = world.size()
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError(f"gradient_predivide_factor is {gradient_predivide_factor}, which wants op=hvd.Average")
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; want 1 or more")
    if isinstance(optimizer, torch.optim.LBFGS) and size > 1:
        raise ValueError(
            "LBFGS goes by the loss, which is each rank's own, so ranks would part; take a lagom run without Horovod "
            "(batches='whole'), or another optimizer"
        )
    _check_groups(groups if groups is not None else num_groups)
    from lagom.compat.horovod.adasum_optimizer import AdasumSteps

    if op == Adasum and size > 1:
        check_adasum(process_set)
    mixed: Any = AdasumSteps if op == Adasum and size > 1 else ReducedSteps
    kind = type(type(optimizer).__name__, (mixed, type(optimizer)), {"__module__": __name__})
    made: Any = object.__new__(kind)
    # A scheduler that has seen the optimizer keeps a bound step in it, which would pass by the one here.
    vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made._names = named(optimizer, named_parameters)
    made._compression = compression
    made.backward_passes_per_step = backward_passes_per_step
    made.op = op
    made.gradient_predivide_factor = gradient_predivide_factor
    made.sparse_as_dense = sparse_as_dense
    made.process_set = process_set
    made._begin()
    return made


def named(optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, Tensor]] | None) -> Named:
    """Names by parameter.

    Raises:
        ValueError: when a parameter of the optimizer has none, or two have the same.
    """
    own = [
        (f"allreduce.noname.{at}.{place}", parameter)
        for at, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
    ]
    pairs = own if given is None else list(given)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                         "model.named_parameters().")  # fmt: skip
    twice = [name for name, num in Counter(name for name, _ in pairs).items() if num > 1]
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    names = {parameter: name for name, parameter in pairs}
    missing = [(at, place, one) for at, group in enumerate(optimizer.param_groups)
               for place, one in enumerate(group["params"]) if one not in names]  # fmt: skip
    if missing:
        at, place, one = missing[0]
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named: {len(missing)} of them, "
            f"first number {place} of group {at}, of shape {list(one.shape)}"
        )
    return names


def _check_groups(groups: Any) -> None:
    if groups is None or (isinstance(groups, int) and groups >= 0):
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


class Counted:
    """Counts the backwards of each parameter; what ``ReducedSteps`` and ``AdasumSteps`` have in common."""

    param_groups: list[dict[str, Any]]
    backward_passes_per_step: int
    process_set: ProcessSet
    _names: Named
    _compression: Any

    def _begin(self) -> None:
        self._left: dict[Tensor, int] = {}
        self._hooked: dict[Tensor, Any] = {}
        self._restart()
        self._hook()

    def _restart(self) -> None:
        self._left = dict.fromkeys(self._names, self.backward_passes_per_step)

    def _hook(self) -> None:
        """See the gradients of parameters that are trained; again for those that came since."""
        if world.size() == 1 or not self.process_set.included():
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._hooked:
                    if parameter not in self._names:  # added by add_param_group
                        self._names[parameter] = f"allreduce.noname.added.{len(self._names)}"
                    self._left.setdefault(parameter, self.backward_passes_per_step)
                    self._hooked[parameter] = parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: Tensor) -> None:
        if self._left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._left[parameter] -= 1
        self._ready(parameter)

    def _ready(self, parameter: Tensor) -> None:
        """``parameter`` has another gradient."""
        raise NotImplementedError

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on."""
        self.backward_passes_per_step = passes
        self._restart()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's; gradients that were under way are forgotten."""
        self._restart()
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _refuse_zero(self, under_way: bool) -> None:
        if under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )


class ReducedSteps(Counted):
    """Gradients are reduced as they become final, and awaited before the step."""

    op: str
    gradient_predivide_factor: float
    sparse_as_dense: bool

    def _begin(self) -> None:
        self._handles: dict[Tensor, Callable[[], None] | None] = {}
        """By parameter: what waits for its gradient and puts it there; None while passes are missing."""
        self._synchronized = False
        self._should_synchronize = True
        super()._begin()

    def _restart(self) -> None:
        self._handles = {}
        self._synchronized = False
        super()._restart()

    def _ready(self, parameter: Tensor) -> None:
        self._handles[parameter] = self._reduced(parameter) if self._left[parameter] == 0 else None

    def _reduced(self, parameter: Tensor) -> Callable[[], None]:
        name = self._names[parameter]
        if parameter.grad is None:
            # Other ranks may have one: what a forward uses may depend on its data.
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        if grad.is_sparse and not self.sparse_as_dense:
            wait = operations.sparse_allreduce_async(grad, name, self.op, self.process_set)

            def put_sparse() -> None:
                parameter.grad = wait()

            return put_sparse
        sent, context = self._compression.compress(grad.to_dense() if grad.is_sparse else grad)
        divides = self.op == Average
        handle = operations.allreduce_async_(
            sent,
            name=name,
            op=self.op,
            prescale_factor=1.0 / self.gradient_predivide_factor if divides else 1.0,
            postscale_factor=self.gradient_predivide_factor if divides else 1.0,
            process_set=self.process_set,
        )

        def put() -> None:
            synchronize(handle)
            came = self._compression.decompress(sent, context)
            if grad.is_sparse:
                parameter.grad = came.to_sparse()
            elif came is not grad:
                grad.copy_(came)

        return put

    def synchronize(self) -> None:
        """Wait until gradients are those of all ranks; those that this rank has none of are zeros then."""
        self._hook()
        for parameter in self._hooked:
            if self._handles.get(parameter) is None:
                self._handles[parameter] = self._reduced(parameter)
        try:
            with torch.no_grad():
                for parameter, put in self._handles.items():
                    assert put is not None
                    put()
                    self._left[parameter] = self.backward_passes_per_step
        finally:
            self._handles = {}
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A ``step`` in here takes the gradients as they are: after ``synchronize``, and clipping, say."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, unless in ``skip_synchronize``, and step; with a ``closure``, after each call of it."""
        if self._should_synchronize and closure is None:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
                    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code.",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        if closure is None:
            return super().step()  # type: ignore[misc]

        def synchronized() -> Any:
            with torch.enable_grad():
                loss = closure()
            if self._should_synchronize:
                self.synchronize()
                self._synchronized = False
            return loss

        return super().step(synchronized)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's, which must not be while gradients are under way."""
        self._refuse_zero(bool(self._handles))
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
