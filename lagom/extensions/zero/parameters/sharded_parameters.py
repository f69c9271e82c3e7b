"""``shard_parameters``: installs ``zero_lvl=3``, which shards parameters as soon as the program makes them."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from lagom.extensions.zero.parameters.dispatch import ParameterUses, make_thread_bootstrap
from lagom.extensions.zero.parameters.memory_access import unshard_on_memory_access
from lagom.extensions.zero.parameters.shards import ParameterShards
from lagom.extensions.zero.parameters.state_dict import make_state_dict
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.session.session import Session


def shard_parameters(session: Session) -> ParameterShards:
    """Have the parameters of a run sharded from its start on; return the shards, which the session has then."""
    assert session.group is not None
    assert session.backwards.divergence is not None
    assert session.backwards.gradient_averager is not None
    weights = session.backwards.parameter_store = ParameterShards(
        session.group,
        session.tensors.leaves,
        lambda: session.may_meet or (session.distributed and session.backwards.depth > 0),
        session.say_once,
    )
    session.backwards.divergence.checksums = weights.checksums
    session.backwards.gradient_averager.set_digest(weights.digest)
    events = session.events
    events.parameter_made.subscribe(weights.adopt)
    events.forward_begun.subscribe(lambda _: weights.resident.begin())
    events.micro_batch_begun.subscribe(weights.resident.begin)
    events.backward_begun.subscribe(weights.begin_backward)
    events.backward_ended.subscribe(weights.free_idle)
    events.program_joins.subscribe(weights.end)
    events.patched.subscribe(lambda stack: stack.enter_context(unshard_for_uses(session, weights)))
    return weights


@contextmanager
def unshard_for_uses(session: Session, weights: ParameterShards) -> Iterator[None]:
    """Make the parameters of ``weights`` whole in the block for every operation that needs their values."""
    with ExitStack() as stack:
        stack.enter_context(unshard_on_memory_access(weights))
        state_dict = make_state_dict(session, weights, vars(torch.nn.Module)["state_dict"])
        stack.enter_context(replaced(torch.nn.Module, "state_dict", state_dict))
        stack.enter_context(replaced(threading.Thread, "_bootstrap_inner", make_thread_bootstrap(weights)))
        stack.enter_context(ParameterUses(weights))
        yield
        if not session.has_joined:
            weights.end()
