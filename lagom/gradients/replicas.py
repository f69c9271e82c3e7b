"""``Replicas``: leaves out the averaging of gradients where all ranks compute the same ones."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from lagom.exchange.agreement_exchange import signature
from lagom.exchange.plain_values import all_gather_values
from lagom.gradients.checksum import checksums
from lagom.gradients.reduction.buckets import Mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lagom.gradients.gradient_averager import GradientAverager
    from lagom.gradients.reduction.buckets import Layout
    from lagom.session.session import Session

_MAX_LAYOUTS = 64
_DIFFER = (
    "the ranks' gradients were equal, and parameters are not any more: something that the program computes is each "
    "rank's own, such as numbers of a generator without a seed, or is done on one rank alone. All ranks go on with "
    "rank 0's parameters and optimizers, and gradients are averaged from now on"
)


class Replicas:
    """Knows whether all ranks compute the same gradients. See Note [Replicas].

    Args:
        knows_rank: tells whether the program has asked for its rank, and so may compute other gradients on a rank.
    """

    def __init__(self, session: Session, averager: GradientAverager, knows_rank: Callable[[], bool]) -> None:
        assert session.backwards.agreement is not None
        assert session.backwards.divergence is not None
        assert session.group is not None
        self._session = session
        self._frame = session.backwards.agreement
        self._divergence = session.backwards.divergence
        self._group = session.group
        self._knows_rank = knows_rank
        self._equal: set[Layout] = set()
        """Layouts of gradients that were equal on all ranks when they were compared."""
        self._has_skipped = False
        self._overlap = averager.overlap
        config = session.config
        self._is_over = (
            config.batches != "whole"
            or session.backwards.gradient_store.always_averages
            or not isinstance(averager.reduction, Mean)
            or session.device.type != "cpu"
        )
        self._divergence.repair = self._follow_first_rank

    def skip(self, layout: Layout) -> bool:
        """Return whether gradients of ``layout`` need neither averaging nor a comparison now."""
        if layout not in self._equal or self._divergence.is_due or not self._may_skip():
            return False
        self._has_skipped = True
        return True

    def compare(self, layout: Layout, gradients: Sequence[torch.Tensor], signed: bytes) -> bool | None:
        """Compare ``gradients`` with those of other ranks; a collective, unless this run must average anyway.

        Args:
            signed: bytes that must be equal on all ranks.

        Returns:
            True if they are equal, and so need no averaging. False if gradients, ``signed`` or knowledge of the rank
            differ between ranks. None if they must be averaged: not compared, or all ranks know their rank.
        """
        if not self._may_skip():
            return None
        # Only this rank's answer. Ranks may ask for their rank in different steps, so the answer is a part of the
        # signature, and all ranks decide by the exchange.
        knows_rank = self._knows_rank()
        numbers = repr(checksums(dict(enumerate(gradients)))).encode()
        if not self._frame.exchange(signature(signed + numbers + bytes([knows_rank]))):
            self._is_over = True
            return False
        if knows_rank:
            self._is_over = True
            return None
        if len(self._equal) == _MAX_LAYOUTS:
            self._equal.clear()
        self._equal.add(layout)
        return True

    @property
    def is_over(self) -> bool:
        """Whether gradients of all backwards are averaged from now on."""
        return self._is_over or self._session.forwards.has_sliced or self._overlap.may_start

    @is_over.setter
    def is_over(self, value: bool) -> None:
        self._is_over = self._is_over or value

    def _may_skip(self) -> bool:
        session = self._session
        if self._is_over or session.forwards.has_sliced or session.passes.share is not None:
            return False
        return self._group.shares_memory

    def _follow_first_rank(self, leaves: Iterable[torch.Tensor]) -> bool:
        """Copy rank 0's parameters and tensors of optimizer states to all ranks, if gradients were not averaged.

        A collective in this case.

        Returns:
            False if all gradients were averaged, or the tensors of ranks differ in number, type or shape.
        """
        if not self._has_skipped:
            return False
        self._has_skipped, self._is_over = False, True
        tensors = [*leaves, *self._optimizer_tensors()]
        kinds = all_gather_values(self._group, [(str(one.dtype), tuple(one.shape)) for one in tensors])
        if any(kind != kinds[0] for kind in kinds):
            return False
        for one in tensors:
            found = one.detach().contiguous()
            self._group.broadcast(found)
            one.data.copy_(found)
        self._session.say_once(_DIFFER)
        return True

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        """Return the tensors in the states of torch's optimizers, in an order that is equal on all ranks."""
        tensors: dict[tuple[int, str, int], torch.Tensor] = {}
        # Not by isinstance(), which asks a proxy for its class, and so may make the object behind the proxy.
        optimizers: Any = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
        for optimizer in optimizers:
            for leaf, state in (vars(optimizer).get("state") or {}).items():
                number = self._session.tensors.leaves.known(leaf)
                for name, value in state.items() if number is not None and isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        tensors[number or 0, str(name), len(tensors)] = value
        return [tensors[key] for key in sorted(tensors)]


# Note [Replicas]
#
# With batches="whole", every rank has whole batches, and computes small networks whole. Then each rank has the
# gradients of one process. To average them changes nothing, and takes as long as the backward of such a network: ranks
# wait for each other in each step. So small gradients are compared instead, on CPUs of one host, without ZeRO and with
# the plain mean: those of each set of leaves when a backward reaches it for the first time, and later whenever
# parameters are compared (see Note [Divergence] in divergence.py). In between, ranks do not wait. Not even the
# gradients of the first backward are averaged: a mean of three equal values may be rounded, and a run that goes on from
# a snapshot begins with a first backward of its own.
#
# Ranks that compute something of their own (a generator without a seed) have different gradients from the beginning,
# and these are averaged. So are the gradients of a program that has asked for its rank by the time of a comparison. If
# ranks begin to differ later, a check finds different parameters. Then all ranks get rank 0's parameters and optimizer
# states, which are those of one process, and gradients are averaged from then on. Only a backward that repeats an
# earlier one skips its exchange: if one rank alone sets a hook on a parameter, its backward waits for the next exchange
# of the others, and all ranks get a DivergenceError.
