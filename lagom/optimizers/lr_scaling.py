"""``lr_scaling="linear"``: multiply learning rates by the number of ranks when an optimizer gets them."""

from __future__ import annotations

import functools
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lagom.errors import LagomError
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.session.session import Session


@contextmanager
def scale_learning_rates(session: Session) -> Iterator[None]:
    """Multiply the ``lr`` of each added parameter group by the number of ranks. See Note [Scaled rates].

    Unpickling the program's call raises a LagomError if the call contains an optimizer, whose rates are not scaled.
    """
    known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    add, take = Optimizer.add_param_group, vars(Optimizer)["__setstate__"]

    def is_scaled(group: Any) -> bool:
        return any(group is own for one in list(known) for own in vars(one).get("param_groups", ()))

    @torch._disable_dynamo
    @functools.wraps(add)
    def patched_add(self: Optimizer, param_group: dict[str, Any]) -> None:
        again = is_scaled(param_group)  # the optimizer wraps another one, and has its groups
        add(self, param_group)
        known.add(self)
        if session.distributed and not again:
            _scale_group(session, self)

    @functools.wraps(take)
    def patched_take(self: Optimizer, state: dict[str, Any]) -> None:
        if session.distributed and not session.is_unpacked and "param_groups" not in vars(self):
            raise LagomError(
                f"lr_scaling='linear' scales the rates of optimizers that are made in the function, and this "
                f"{type(self).__name__} was made before; make it in the function, or scale its rate there"
            )
        take(self, state)

    with ExitStack() as stack:
        stack.enter_context(replaced(Optimizer, "add_param_group", patched_add))
        stack.enter_context(replaced(Optimizer, "__setstate__", patched_take))
        yield


def _scale_group(session: Session, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[-1]
    if "lr" not in group:
        return
    before = group["lr"]
    group["lr"] = before * session.world_size
    text = (
        f"lr_scaling='linear': {type(optimizer).__name__} has the learning rate {float(group['lr']):g} in place of "
        f"{float(before):g}, for {session.world_size} ranks"
    )
    if session.config.batches != "per_rank":
        text += (
            f"; with batches={session.config.batches!r} a batch is no larger than on one machine, for which the "
            "program's own rate is made"
        )
    session.say_once(text)


# Note [Scaled rates]
#
# Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677): if the batch is k times as large, the rate is
# multiplied by k. lagom takes the number of ranks for k, which is right with batches="per_rank". It scales the rate
# when a parameter group is first added to an optimizer, before a scheduler reads the rate. So rates that the program
# later computes from this one (with a scheduler, or in proportion) are scaled as well. A rate that the program sets to
# a fixed value, or loads from a checkpoint, is not scaled.
