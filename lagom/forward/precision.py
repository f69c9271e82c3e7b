"""Mixed precision by a setting: forwards under autocast, and fp16 gradients that neither vanish nor overflow."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.autograd
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from lagom.accelerators import has_bf16
from lagom.patching.object_reference import ObjectReference
from lagom.patching.replace import replaced
from lagom.run_state.leaves import find_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from lagom.session.session import Session

FIRST_SCALE = 2.0**16
"""First scale of losses. This and the next two values are those of torch's GradScaler."""
GROWTH_INTERVAL = 2000
_FACTOR = 2.0


def autocast_dtype(asked: Literal[True, "bf16", "fp16"], device: torch.device) -> torch.dtype:
    """Return the type that ``mixed_precision`` means on ``device``."""
    if asked is True:
        return torch.bfloat16 if has_bf16(device) else torch.float16
    return torch.bfloat16 if asked == "bf16" else torch.float16


class Precision:
    """Patches a program for ``mixed_precision``. See Note [Mixed precision]."""

    def __init__(self, session: Session, asked: Literal[True, "bf16", "fp16"]) -> None:
        self._session = session
        self._device = session.device.type
        self.dtype = autocast_dtype(asked, session.device)
        self._off = False
        self._active = False
        """Whether an outermost forward is running in lagom's autocast."""
        self._converts = False
        self._entering = False
        self._depth = 0
        """Depth of nested backwards."""
        self._scaled_leaves: set[int] = set()
        """Ids of leaves that have a hook that divides gradients by the scale."""
        self._own: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)
        """For each module, whether it has parameters, all of them in float32; empty again after a conversion."""

    @contextmanager
    def convert_outputs(self) -> Iterator[None]:
        """Convert the outermost module's outputs to float32; enter this before the patches that split forwards."""
        original = vars(nn.Module)["__call__"]

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._active or self._converts or torch.compiler.is_dynamo_compiling():
                return original(module, *args, **kwargs)
            self._converts = True
            try:
                return tree_map_only(Tensor, self._to_float32, original(module, *args, **kwargs))
            finally:
                self._converts = False

        with replaced(nn.Module, "__call__", call):
            yield

    @contextmanager
    def autocast_forwards(self) -> Iterator[None]:
        """Run outermost forwards under autocast; enter this after the patches that split forwards.

        Autocast of the program's own outside of forwards, or a GradScaler, switches lagom's precision off.
        """
        original, convert = vars(nn.Module)["__call__"], vars(nn.Module)["_apply"]
        enter, init = vars(torch.autocast)["__enter__"], vars(torch.amp.GradScaler)["__init__"]

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or not self._applies(module):
                return original(module, *args, **kwargs)
            self._active = self._entering = True
            try:
                with torch.autocast(self._device, self.dtype):
                    self._entering = False
                    return original(module, *args, **kwargs)
            finally:
                self._active = self._entering = False

        def patched_convert(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._own.clear()  # ``half()``, ``to(dtype)`` and the like call ``_apply`` of the module and all inside it
            return convert(module, *args, **kwargs)

        def patched_enter(context: Any) -> Any:
            if not (self._entering or self._active or self._depth or torch.compiler.is_dynamo_compiling()):
                self._switch_off("autocast")
            return enter(context)

        def patched_init(scaler: Any, *args: Any, **kwargs: Any) -> None:
            init(scaler, *args, **kwargs)
            if scaler.is_enabled():
                self._switch_off("a GradScaler")

        with (
            replaced(nn.Module, "__call__", call),
            replaced(nn.Module, "_apply", patched_convert),
            replaced(torch.autocast, "__enter__", patched_enter),
            replaced(torch.amp.GradScaler, "__init__", patched_init),
        ):
            yield

    @contextmanager
    def scale_backwards(self) -> Iterator[None]:
        """Patch backwards to count their depth, and for fp16 to scale gradients inside; patch optimizer steps for fp16.

        Enter this before the patches that average gradients.
        """
        original = torch.autograd._engine_run_backward
        scaling = _GradientScaler(self._session) if self.dtype is torch.float16 else None

        def run_backward(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
            self._depth += 1
            try:
                if scaling is None or self._off or not (self._session.live and options.get("accumulate_grad", False)):
                    return original(outputs, *args, **options)
                return self._scale_backward(scaling, original, outputs, args, options)
            finally:
                self._depth -= 1

        with ExitStack() as stack:
            stack.enter_context(replaced(torch.autograd, "_engine_run_backward", run_backward))
            if scaling is not None:
                before = register_optimizer_step_pre_hook(self._skip_if_disabled(scaling.drop_overflow))
                after = register_optimizer_step_post_hook(self._skip_if_disabled(scaling.restore_gradients))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def _scale_backward(
        self,
        scaling: _GradientScaler,
        original: Callable[..., Any],
        outputs: Sequence[Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> Any:
        repeated = self._session.tensors.repeated_inputs
        leaf_by_id = {id(leaf): leaf for leaf in find_leaves(outputs, args[3]) if leaf not in repeated}
        leaves = [leaf for key, leaf in leaf_by_id.items() if key not in self._scaled_leaves]
        # A nested backward is given gradients that are scaled already.
        roots = args[0]
        if self._depth == 1:
            roots = tuple(None if one is None else one * scaling.scale for one in roots)
        handles = [scaling.unscale(leaf) for leaf in leaves]
        self._scaled_leaves.update(map(id, leaves))
        try:
            return original(outputs, roots, *args[1:], **options)
        finally:
            self._scaled_leaves.difference_update(map(id, leaves))
            for handle in handles:
                handle.remove()

    def _skip_if_disabled(self, hook: Callable[[Optimizer], None]) -> Callable[..., None]:
        def called(optimizer: Optimizer, *_: Any) -> None:
            if not self._off and self._session.live:
                hook(optimizer)

        return called

    def _switch_off(self, what: str) -> None:
        if not self._off:
            self._session.say_once(f"the program uses {what} itself, so mixed_precision changes nothing")
        self._off = True

    def _applies(self, module: nn.Module) -> bool:
        if self._off or self._active or self._depth or not self._session.live:
            return False
        if torch.is_autocast_enabled(self._device):
            return False  # an autocast of the program's, or of a checkpoint, is in force
        own: bool | None = self._own.get(module)
        if own is None:
            dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
            own = self._own[module] = dtypes == {torch.float32}
        return own

    def _to_float32(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == self.dtype else tensor


class _GradientScaler:
    """Keeps the factor that losses are multiplied by, and skips steps when gradients have overflowed."""

    def __init__(self, session: Session) -> None:
        self.scale = FIRST_SCALE
        self._session = session
        self._num_good = 0
        self._held: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)

    def unscale(self, leaf: Tensor) -> RemovableHandle:
        """Set a hook on ``leaf``, before its other hooks, that divides gradients by the scale; return its handle."""
        inverse = 1.0 / self.scale
        others = dict(leaf._backward_hooks or {})
        handle: RemovableHandle = leaf.register_hook(lambda gradient: gradient * inverse)
        hooks: Any = leaf._backward_hooks
        for key, hook in others.items():  # autograd uses insertion order, not the OrderedDict's order
            del hooks[key]
            hooks[key] = hook
        return handle

    def drop_overflow(self, optimizer: Optimizer) -> None:
        """Remove the gradients before a step if some are not finite, so that the step changes nothing.

        The scale is halved then, and doubled after ``GROWTH_INTERVAL`` finite steps. With sharded gradients this is a
        collective.
        """
        store = self._session.backwards.gradient_store
        graded = [p for group in optimizer.param_groups for p in group["params"] if store.has_gradient(p)]
        if not graded:
            return
        if store.check_all(graded, _are_finite, "optimizer.step() in fp16"):
            self._num_good += 1
            if self._num_good >= GROWTH_INTERVAL:
                self.scale, self._num_good = self.scale * _FACTOR, 0
            return
        self.scale, self._num_good = self.scale / _FACTOR, 0
        self._session.say_once(
            f"gradients overflowed fp16; {type(optimizer).__name__} leaves the step out, and losses are scaled by less"
        )
        self._held[optimizer] = [(p, p.grad) for p in graded]
        for p in graded:
            p.grad = None

    def restore_gradients(self, optimizer: Optimizer) -> None:
        """Restore the removed gradients after the step."""
        for p, gradient in self._held.pop(optimizer, ()):
            p.grad = gradient


def _are_finite(gradients: Iterable[Tensor | None]) -> bool:
    values = [g.coalesce().values() if g.is_sparse else g for g in gradients if g is not None]
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in values:
        by_device.setdefault(value.device, []).append(value)
    norms = [torch.stack([n.float() for n in torch._foreach_norm(part)]).sum() for part in by_device.values()]
    return all(bool(norm.isfinite()) for norm in norms)


# Note [Mixed precision]
#
# The forward of an outermost module runs under torch.autocast, and its outputs are converted to float32, so a loss that
# the program computes itself has all digits. Parameters, gradients and optimizer state stay in float32. Modules without
# parameters (usually losses) run unchanged, and so do modules that the program has converted to double or half. A
# program that enters autocast outside of forwards, or makes a GradScaler, manages precision itself: lagom then changes
# nothing.
#
# In fp16 small gradients vanish, so the roots of a backward are multiplied by a scale. Each leaf divides by it before
# it accumulates, by a hook that runs before all others. So gradients of leaves have their true size whenever the
# program clips, adds up or looks at them; gradients of activations (hooks, retain_grad) are scaled. When some are not
# finite, the optimizer's next step is skipped and the scale is halved; after 2000 good steps it is doubled, as by
# torch.amp.GradScaler. Gradients are averaged before this decision, or, if gradients are sharded, ranks exchange their
# decisions, so all ranks decide equally. Results of torch.autograd.grad are not scaled, and a closure's gradients are
# not checked.
