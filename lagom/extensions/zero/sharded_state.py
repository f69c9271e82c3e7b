"""``ShardedState``: the placeholder in ``optimizer.state`` while each rank has a part of the state."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from lagom.errors import LagomError
from lagom.exchange.plain_values import all_gather_values
from lagom.optimizers.state_placeholder import StatePlaceholder

if TYPE_CHECKING:
    from lagom.exchange.group import Group
    from lagom.extensions.zero.sharded_optimizer import ShardedOptimizer


class ShardedState(StatePlaceholder):
    """Stands in for the state of an optimizer while each rank has a part of it; any read raises a ``LagomError``."""

    def __init__(self, sharded: ShardedOptimizer) -> None:
        vars(self)["sharded"] = sharded

    def num_bytes(self) -> int:
        """See ``StatePlaceholder``."""
        sharded: ShardedOptimizer = vars(self)["sharded"]
        return sharded.num_bytes()

    def __getattr__(self, name: str) -> NoReturn:
        # Not an AttributeError: ``hasattr`` and ``getattr`` with a default would take it for a missing attribute.
        raise LagomError(_GONE)

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise LagomError(_GONE)

    def _gone(self, *_: object) -> NoReturn:
        raise LagomError(_GONE)

    __len__ = __iter__ = __contains__ = __getitem__ = _gone


_GONE = (
    "the state of this optimizer is shared out over the ranks (zero_lvl), and is asked for where the ranks cannot be "
    "reached: in another process or thread, or after the run. Take its state_dict() in the training function"
)


def refuse_state(group: Group) -> NoReturn:
    """Answer a rank that gathers an optimizer state that this rank does not have, or has at another step; then raise.

    Raises:
        LagomError: always.
    """
    all_gather_values(group, None)
    raise LagomError("another rank asked for the state of an optimizer that this one does not have")
