"""Patches of modules and parameters: track their creation, and prepare each outermost forward."""

from __future__ import annotations

import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lagom.accelerators import is_accelerator
from lagom.forward.rows.slicer import Slicer, is_splittable
from lagom.patching.replace import replaced
from lagom.watch import step_clock
from lagom.watch.spans import FORWARD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.run_state.random_streams import OwnStreams
    from lagom.session.session import Session


@contextmanager
def track_modules(session: Session) -> Iterator[None]:
    """Record modules and parameters as they are created: constructed, unpickled or copied."""
    init, setstate = vars(nn.Module)["__init__"], vars(nn.Module)["__setstate__"]

    def patched_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        session.tensors.modules[self] = None

    def patched_setstate(self: nn.Module, state: dict[str, Any]) -> None:
        setstate(self, state)
        session.tensors.modules[self] = None

    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "__init__", patched_init))
        stack.enter_context(replaced(nn.Module, "__setstate__", patched_setstate))
        for kind in (nn.Parameter, UninitializedParameter):
            stack.enter_context(replaced(kind, "__new__", staticmethod(_make_new(session, kind.__new__))))
        yield


def _make_new(session: Session, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    made = session.events.parameter_made

    def patched_new(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        parameter = make(cls, *args, **kwargs)
        session.tensors.leaves.add_leaf(parameter)
        if (call := made.call) is not None:
            call(parameter)
        return parameter

    return patched_new


@contextmanager
def prepare_forwards(session: Session, streams: OwnStreams) -> Iterator[None]:
    """Patch outermost forwards: move the module to its input's device, split rows, use the rank's own random stream.

    The rank's own stream is used in training where ranks have different samples of a batch, since dropout must differ
    there. It is not used in a module's first call, which may create parameters, nor in a backward, where checkpoints
    repeat a forward. Rows are split between ranks (row_split) and into micro-batches as the settings say.
    """
    forwards = _ForwardState(session, streams)
    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "__call__", _make_call(forwards)))
        if session.world_size > 1 or session.config.micro_batches is not None:
            stack.enter_context(replaced(torch.utils.checkpoint, _CHECKPOINT, _make_checkpoint_generator(forwards)))
            stack.enter_context(patch_reentrant_checkpoints(session))
        yield


_CHECKPOINT = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_CHECKPOINT}_impl"):  # from torch 2.15 on, ``checkpoint`` calls this one
    _CHECKPOINT += "_impl"


class _ForwardState:
    """Tracks whether a forward is running, and which modules have been called before."""

    def __init__(self, session: Session, streams: OwnStreams) -> None:
        self.session = session
        self.streams = streams
        self.inside = False
        self._called: dict[int, weakref.ref[nn.Module]] = {}
        """Modules by id, since a module may be equal to another one, or have no hash."""

    @contextmanager
    def within(self) -> Iterator[None]:
        """Treat modules that are called in this context as parts of another module's forward."""
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Treat modules that are called in this context as outermost."""
        self.inside = False
        try:
            yield
        finally:
            self.inside = True

    def draws_own(self, function: Any) -> bool:
        """Return whether this outermost call draws from the rank's own stream."""
        session = self.session
        trains = session.distributed and getattr(function, "training", True) and torch.is_grad_enabled()
        if not (trains and session.backwards.depth == 0 and session.passes.share is not None):
            return False
        return not isinstance(function, nn.Module) or self._was_called(function)

    def trains_own(self, module: nn.Module) -> bool:
        """Return the same as ``draws_own``, faster, for a module in training with gradients on, on several ranks."""
        session = self.session
        return session.backwards.depth == 0 and session.passes.share is not None and self._was_called(module)

    def _was_called(self, module: nn.Module) -> bool:
        """Return whether ``module`` was called before, and record this call."""
        key = id(module)
        if (ref := self._called.get(key)) is not None and ref() is module:
            return True

        def forget(gone: weakref.ref[nn.Module]) -> None:
            if self._called.get(key) is gone:
                del self._called[key]

        self._called[key] = weakref.ref(module, forget)
        return False


def _make_call(forwards: _ForwardState) -> Callable[..., Any]:
    original = vars(nn.Module)["__call__"]
    micro = None
    if forwards.session.config.micro_batches is not None:
        from lagom.forward.micro_batches.split_forward import MicroBatches

        micro = MicroBatches(forwards.session, original, forwards.within)
    run = original if micro is None else micro.call
    call_outermost = _make_outermost_call(forwards, run)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if forwards.inside or torch.compiler.is_dynamo_compiling():
            if micro is not None and micro.descends and not torch.compiler.is_dynamo_compiling():
                return run(module, *args, **kwargs)
            return original(module, *args, **kwargs)
        return call_outermost(module, args, kwargs)

    return call


def _make_outermost_call(forwards: _ForwardState, run: Callable[..., Any]) -> Callable[..., Any]:
    session, follow = forwards.session, _input_follower(forwards.session)
    several, slices_training = session.world_size > 1, session.config.batches == "whole"
    may_slice = several and (slices_training or session.config.evaluation == "gathered")
    slicer = Slicer(session, run, forwards.outside) if may_slice else None
    spans, begun, clock = session.spans, session.events.forward_begun, session.clock

    def call_outermost(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        forwards.inside = True
        start = 0 if spans is None else spans.clock()
        part = clock.switch(step_clock.FORWARD)
        try:
            if (tell := begun.call) is not None:
                tell(module)
            if follow is not None and session.live:
                follow(module, args, kwargs)
            share, trains = None, False
            if several and session.live and torch.is_grad_enabled():
                data = args[0] if len(args) == 1 and not kwargs else (args, kwargs)
                share = session.find_share(data)
                trains = getattr(module, "training", True)
                if share is not None:
                    clock.rename(step_clock.FORWARD_DIVIDED)
            if slicer is not None and (slices_training or not trains) and is_splittable(session, module):
                return slicer.call(module, args, kwargs)
            outputs = _run_on_share(forwards, run, module, args, kwargs) if trains else run(module, *args, **kwargs)
            if share is not None:
                session.backwards.loss_weights.record_outputs(outputs, share)
            if several:
                session.evaluation_passes.record_forward((args, kwargs), outputs)
            return outputs
        finally:
            forwards.inside = False
            clock.switch(part)
            if spans is not None:
                spans.add(FORWARD, type(module).__name__, start)

    return call_outermost


def _input_follower(session: Session) -> Callable[..., None] | None:
    """Return the function that moves a module to the device of its input; None on a rank without an accelerator."""
    if not is_accelerator(session.device):
        return None
    from lagom.run_state.device_moves import InputFollower

    return InputFollower(session.device).follow


def _run_on_share(
    forwards: _ForwardState, run: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a forward in training, which draws from the rank's own stream if ranks have different samples."""
    session, streams = forwards.session, forwards.streams
    values = session.forwards.running_values
    seen = values.snapshot(module) if session.passes.share is not None else None
    if forwards.trains_own(module):
        common = streams.swap()
        try:
            outputs = run(module, *args, **kwargs)
        finally:
            streams.swap_back(*common)
    else:
        outputs = run(module, *args, **kwargs)
    if seen is not None:
        values.warn_about_changes(module, seen)
    return outputs


def _make_checkpoint_generator(forwards: _ForwardState) -> Callable[..., Iterator[None]]:
    original = vars(torch.utils.checkpoint)[_CHECKPOINT]

    def generator(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        function = _repeat_in_region(forwards.session, function)
        # torch's checkpoint records the states of generators before it calls the function, and restores them in the
        # backward. So the rank's own stream is swapped in around the whole checkpoint.
        if forwards.inside or forwards.session.backwards.depth:
            yield from original(function, *args, **kwargs)
            return
        forwards.inside = True
        try:
            with forwards.streams.in_forward() if forwards.draws_own(function) else nullcontext():
                yield from original(function, *args, **kwargs)
        finally:
            forwards.inside = False

    return generator


@contextmanager
def patch_reentrant_checkpoints(session: Session) -> Iterator[None]:
    """Patch reentrant checkpoints: record repeated forwards' inputs, and repeat a sliced forward as a sliced one."""
    function = torch.utils.checkpoint.CheckpointFunction
    apply, detach = function.apply, torch.utils.checkpoint.detach_variable

    def patched_apply(run: Any, *args: Any) -> Any:
        return apply(_repeat_in_region(session, run), *args)  # type: ignore[no-untyped-call]

    def patched_detach(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        detached: tuple[Any, ...] = detach(inputs)
        for tensor in detached:
            if isinstance(tensor, torch.Tensor):
                session.tensors.repeated_inputs[tensor] = None
        return detached

    with (
        replaced(function, "apply", staticmethod(patched_apply)),
        replaced(torch.utils.checkpoint, "detach_variable", patched_detach),
    ):
        yield


def _repeat_in_region(session: Session, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpoint's ``function`` that the backward repeats as a part of the present forward.

    It enters the sliced forward and the micro-batch again in which the program has called it.
    """
    regions = [
        region for region in (session.forwards.sliced_forward, session.forwards.micro_batch) if region is not None
    ]
    if not regions:
        return function

    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for region in regions:
                stack.enter_context(region.enter(session))
            return function(*args, **kwargs)

    return again
