"""``shard``: lets each rank step a part of the parameters; the program still sees the whole optimizer state."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lagom.extensions.zero.distributed_checkpoints import stream_checkpoints
from lagom.extensions.zero.gradient_access import access_shards
from lagom.extensions.zero.gradient_shards import GradientShards
from lagom.extensions.zero.optimizer_group import OptimizerGroup
from lagom.extensions.zero.parameters.sharded_parameters import shard_parameters
from lagom.extensions.zero.snapshot_shards import SnapshotShards
from lagom.optimizers.step_patches import replace_steps
from lagom.patching.replace import replaced
from lagom.watch.step_clock import OPTIMIZER_DIVIDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.extensions.zero.parameters.shards import ParameterShards
    from lagom.session.session import Session


def shard(session: Session) -> None:
    """Shard the optimizers of a run from its start on; gradients too from level 2 on, and parameters at level 3."""
    assert session.group is not None
    assert session.backwards.gradient_averager is not None
    gradients, weights = None, None
    shards = session.resumption.shards = SnapshotShards(session)
    if session.config.zero_lvl > 1:
        gradients = session.backwards.gradient_store = GradientShards(
            session.group, session.tensors.leaves, lambda: session.may_meet, session.check_place, session.say_once
        )
        session.backwards.gradient_averager.overlap.shard_store = gradients
        session.events.patched.subscribe(lambda stack: stack.enter_context(access_shards(session, gradients)))
    else:
        session.backwards.gradient_store.always_averages = True
    if session.config.zero_lvl > 2:
        assert gradients is not None
        weights = shard_parameters(session)
        gradients.parameter_parts = weights.parts
        session.events.parameter_made.subscribe(shards.adopt)
    shards.gradients, shards.weights = gradients, weights
    session.events.patched.subscribe(lambda stack: stack.enter_context(shard_steps(session, gradients, weights)))


@contextmanager
def shard_steps(session: Session, gradients: GradientShards | None, weights: ParameterShards | None) -> Iterator[None]:
    """Patch the ``step`` of every optimizer class to step this rank's part, and ``Optimizer.state`` to be whole.

    When the block ends without an error, gather the state of all optimizers: a collective, left out if the program has
    a process group of its own. Torch wraps the ``step`` of a class for hooks when it makes the first instance; the
    hooks stay outermost.
    """
    assert session.group is not None
    assert session.backwards.agreement is not None
    assert session.backwards.divergence is not None
    assert session.backwards.gradient_averager is not None
    optimizers = OptimizerGroup(
        session.group,
        session.backwards.agreement,
        session.backwards.divergence,
        gradients,
        weights,
        is_own=session.backwards.gradient_averager.keeps_own,
        say=session.say_once,
        name=session.tensors.modules.name_of,
    )
    if isinstance(shards := session.resumption.shards, SnapshotShards):
        shards.optimizers = optimizers
    with (
        replace_steps(_make_steps(session, optimizers), existing=True),
        replaced(Optimizer, "state", _make_state_property(session, optimizers)),
        stream_checkpoints(session, optimizers, weights),
    ):
        yield
        if not session.has_joined:
            optimizers.end()


def _make_steps(
    session: Session, optimizers: OptimizerGroup
) -> Callable[[type, Callable[..., Any]], Callable[..., Any]]:
    def step_for(_: type, inner: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if not session.distributed or optimizers.runs_unchanged:
                return inner(self, *args, **kwargs)
            with session.clock.during(OPTIMIZER_DIVIDED):
                return optimizers.step(self, inner, args, kwargs)

        return step

    return step_for


def _make_state_property(session: Session, optimizers: OptimizerGroup) -> property:
    def get(self: Optimizer) -> Any:
        if "state" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute 'state'")
        return optimizers.state(self) if session.distributed else vars(self)["state"]

    def put(self: Optimizer, value: Any) -> None:
        vars(self)["state"] = value

    def drop(self: Optimizer) -> None:
        del vars(self)["state"]

    return property(get, put, drop)
