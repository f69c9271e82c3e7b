"""``GradCalls``: calls of ``torch.autograd.grad``, whose gradients are averaged over the ranks where this is right.

``AutogradGradAverager`` averages what a call returns, or what the program differentiates. A batched call
(``is_grads_batched``, ``torch.func.vmap``) is split, since an exchange between ranks cannot be part of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

from lagom.errors import DivergenceError, LagomError
from lagom.exchange.plain_values import all_gather_values
from lagom.forward.rows.row_functions import is_batched, passes_gather
from lagom.gradients.backward_gradients import DelayedHooks
from lagom.gradients.checksum import hash_values
from lagom.gradients.gradient_averager import ReachedLeaves
from lagom.gradients.tensor_averager import view_as_real
from lagom.run_state.leaves import ACCUMULATE, Likeness, leaf_of_node
from lagom.run_state.loss_terms import ExchangeFunction, find_exchanges
from lagom.run_state.memory_layout import resolve_lazy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.autograd.graph import Node

    from lagom.exchange.group import Group
    from lagom.gradients.backward_gradients import BackwardGradients
    from lagom.gradients.divergence import DivergenceMonitor
    from lagom.gradients.gradient_averager import GradientAverager
    from lagom.run_state.leaves import Leaves
    from lagom.session.session import Session

PLACE = "torch.autograd.grad"
_BACKWARD = "a backward through gradients"


class AutogradGradAverager:
    """Averages gradients over the ranks in a differentiable way. See Note [Gradients of gradients]."""

    def __init__(self, group: Group, leaves: Leaves, divergence: DivergenceMonitor, averager: GradientAverager) -> None:
        self._group = group
        self._leaves = leaves
        self._divergence = divergence
        self._gradient_averager = averager

    def average_returned(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], weights: Sequence[float]
    ) -> list[Tensor | None]:
        """Return the averages of ``gradients``, which ``torch.autograd.grad`` computed for ``inputs``; a collective.

        An average is None if all ranks have None. A gradient is returned as this rank's own if its input is a leaf that
        is no Parameter and differs between ranks, or if the ranks' gradients have different shapes.

        Args:
            weights: the weights of this rank's shares, by which ``gradients`` were multiplied; a rank's own gradient is
                divided by its weight again, unless the weight is 0.

        Raises:
            DivergenceError: on all ranks, if they ask for gradients of different parameters, or parameters or places in
                the program differ.
        """
        self._divergence.count_step()
        numbers = [self._number_input(i, one) for i, one in enumerate(inputs)]
        plain = [hash_values(one) if _is_plain_leaf(one) else b"" for one in inputs]
        identity = b"".join(plain) + (b"graph" if _have_graph(gradients) else b"")
        averages = self._average(PLACE, numbers, gradients, identity)
        if averages is None:
            filled, local = self._agree_on_gradients(inputs, gradients, numbers, plain)
            averages = self._average(PLACE, numbers, [None if i in local else g for i, g in enumerate(filled)])
            assert averages is not None, "ranks have just agreed"
            for i in local:
                own = gradients[i]
                averages[i] = own if own is None or weights[i] in (0, 1) else own / weights[i]
        return averages

    def average_accumulated(self, pending: BackwardGradients) -> None:
        """Average the gradients of a backward with ``create_graph=True``; the averages can be differentiated.

        Raises:
            LagomError: if the run uses Adasum, which cannot be differentiated.
        """
        if not self._gradient_averager.reduction.is_linear:
            raise LagomError(
                "a backward with create_graph=True needs averages of gradients, which can be differentiated: with "
                "reduction='adasum' use torch.autograd.grad, whose gradients are"
            )
        own = {id(leaf): leaf.grad for leaf in pending.leaves if leaf.grad is not None and leaf.grad.requires_grad}
        with torch.no_grad():
            for leaf in pending.leaves:
                leaf.grad = None if leaf.grad is None else leaf.grad.detach().clone()
        self._gradient_averager.average_backward(pending)
        reached = [leaf for leaf in pending.leaves if leaf.grad is not None]
        # By number, since each rank may have reached other leaves first.
        leaves = sorted(
            (leaf for leaf in reached if not self._gradient_averager.keeps_own(leaf)), key=self._leaves.number
        )
        averages = [leaf.grad for leaf in leaves]
        graphs = [own[id(leaf)] if id(leaf) in own else _zeros_with_graph(leaf) for leaf in leaves]
        results: Any = AverageFunction.apply(self, averages, *graphs)  # type: ignore[no-untyped-call]
        for leaf, result in zip(leaves, results, strict=True):
            leaf.grad = result

    def average_incoming(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the averages of ``gradients``, which flow back to averaged gradients; a collective in a backward.

        Raises:
            DivergenceError: on all ranks, if they differentiate different gradients.
        """
        found = self._average(_BACKWARD, [-1 - i for i in range(len(gradients))], gradients)
        if found is None:
            self._divergence.find_divergence(_BACKWARD)
            raise DivergenceError("other ranks differentiate other gradients than this one")
        return found

    def _average(
        self, kind: str, numbers: Sequence[int], gradients: Sequence[Tensor | None], identity: bytes = b""
    ) -> list[Tensor | None] | None:
        present = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
        with torch.no_grad():
            averages = [_copy(gradient) for _, gradient in present]
            reached = ReachedLeaves([numbers[i] for i, _ in present], [view_as_real(average) for average in averages])
            if not self._gradient_averager.reduce_if_agreed(kind, reached, identity, by_mean=True):
                return None
        results: Any = averages
        if _have_graph(gradients):
            results = AverageFunction.apply(self, averages, *[gradient for _, gradient in present])  # type: ignore[no-untyped-call]
        averaged: list[Tensor | None] = [None] * len(gradients)
        for (i, _), result in zip(present, results, strict=True):
            averaged[i] = result
        return averaged

    def _number_input(self, place: int, one: Tensor) -> int:
        return self._leaves.number(one) if isinstance(one, nn.Parameter) else -1 - place

    def _agree_on_gradients(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], numbers: list[int], plain: list[bytes]
    ) -> tuple[list[Tensor | None], set[int]]:
        """Compare the inputs of all ranks; a collective.

        Returns:
            ``gradients``, with zeros for inputs that have gradients on other ranks only, dense where another rank's
            gradient is dense, and with a graph where another rank's gradient has one; and the indices of inputs whose
            gradients stay this rank's own.
        """
        self._divergence.find_divergence(PLACE)
        kinds = [None if g is None else (g.dtype, tuple(g.shape), g.is_sparse, g.requires_grad) for g in gradients]
        mine = list(zip(numbers, plain, kinds, strict=True))
        rows = all_gather_values(self._group, mine)
        if any([one[0] for one in row] != numbers for row in rows):
            raise DivergenceError(
                "torch.autograd.grad is asked for gradients of different parameters on different ranks; ask for the "
                "same ones, in the same order, on every rank"
            )
        self._gradient_averager.verify_initial_values(numbers)
        filled, local = list(gradients), set()
        for i, held in enumerate(zip(*rows, strict=True)):
            present = [kind for _, _, kind in held if kind is not None]
            if len({one[1] for one in held}) > 1 or len({kind[1] for kind in present}) > 1:
                local.add(i)
                continue
            gradient = filled[i]
            if present and gradient is None:
                gradient = torch.zeros_like(inputs[i])
            elif gradient is not None and gradient.is_sparse and not all(k and k[2] and not k[3] for _, _, k in held):
                gradient = gradient.to_dense()
            if gradient is not None and not gradient.requires_grad and any(kind[3] for kind in present):
                gradient = gradient + _zeros_with_graph(inputs[i])
            filled[i] = gradient
        return filled, local


def _have_graph(gradients: Sequence[Tensor | None]) -> bool:
    """Return whether averages of ``gradients`` can be differentiated."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in gradients)


def _zeros_with_graph(one: Tensor) -> Tensor:
    """Return zeros that are computed from ``one``: they let this rank take part in a backward through averages."""
    return one.masked_fill(torch.ones_like(one, dtype=torch.bool), 0)  # ``one * 0`` would have NaN where it is infinite


def _copy(gradient: Tensor) -> Tensor:
    resolved = gradient if gradient.layout is not torch.strided else resolve_lazy(gradient)
    return gradient.detach().clone() if resolved is gradient else resolved.detach()


class AverageFunction(ExchangeFunction):
    """Replaces this rank's gradients by averages; its backward averages the incoming gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, grads: AutogradGradAverager, averages: list[Tensor], *own: Tensor) -> tuple[Tensor, ...]:
        ctx.grads = grads
        return tuple(averages)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.grads.average_incoming(gradients))


def is_averaged(tensor: Tensor, likeness: Likeness, *, shared_out: bool) -> bool:
    """Return whether ``torch.autograd.grad`` averages gradients of ``tensor``, since all ranks have the same values.

    Parameters count as equal, and tensors computed from them by elementwise arithmetic alone (the fast weights of
    MAML). Samples and activations do not. A plain leaf (no Parameter) may be equal; its values are compared later.

    Args:
        likeness: how closely ``tensor`` resembles data of the batch.
        shared_out: whether ranks may compute different parts of a batch. If not, gradients of plain leaves are taken to
            be equal, and are not averaged.
    """
    if isinstance(tensor, nn.Parameter) or _is_made_of_parameters(tensor):
        return True
    return _is_plain_leaf(tensor) and shared_out and likeness is not Likeness.SHAPE


def _is_plain_leaf(tensor: Tensor) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.is_leaf and not isinstance(tensor, nn.Parameter) and not wrapped


_ELEMENTWISE = {
    f"{name}Backward{suffix}"
    for name in ("Add", "Sub", "Mul", "Div", "Neg", "Clone", "Alias", "Addcmul", "Addcdiv", "AverageFunction")
    for suffix in ("", "0", "1")
}


def _is_made_of_parameters(tensor: Tensor) -> bool:
    if tensor.grad_fn is None:
        return False
    shapes: set[torch.Size] = set()
    seen: set[Node] = {tensor.grad_fn}
    pending = [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if type(node) is ACCUMULATE:
            leaf = leaf_of_node(node)
            if not isinstance(leaf, nn.Parameter):
                return False
            shapes.add(leaf.shape)
        elif node.name() not in _ELEMENTWISE:
            return False
        elif node.name() != "AverageFunctionBackward":
            following = [next_node for next_node, _ in node.next_functions if next_node is not None]
            pending += [next_node for next_node in following if next_node not in seen]
            seen.update(following)
    return tensor.shape in shapes


# Note [Gradients of gradients]
#
# A gradient that torch.autograd.grad returns for a parameter is weighted like that of a backward (see Note [Terms] in
# run_state/loss_terms.py). Ranks average it by the mean, whatever the run's reduction.
# With create_graph=True the program may differentiate the average. Let L_r be the weighted objective of rank r, and g_r
# its gradient. The program gets g = mean(g_r) on every rank, and computes an objective M_r(g). lagom averages gradients
# in the end, so the result must be the derivative of mean(M_r). With u_r = dM_r/dg and H_r the derivative of g_r, this
# is mean(H_r) mean(u_r). If v is the gradient that flows back to g_r, rank r contributes H_r v. So v must be mean(u_r):
# the gradient of an average is the average of the gradients. With v = u_r, meta-gradients would be wrong whenever ranks
# have different samples.


class GradCalls:
    """Runs the program's calls of ``torch.autograd.grad``, and averages gradients of inputs that ranks have in common.

    Args:
        original: torch's own ``torch.autograd._engine_run_backward``.
        averager: averages the gradients.
    """

    def __init__(self, session: Session, original: Callable[..., Any], averager: AutogradGradAverager) -> None:
        assert session.backwards.divergence is not None
        self._session = session
        self._original = original
        self._divergence = session.backwards.divergence
        self._grads = averager

    def run(self, outputs: Sequence[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run ``torch.autograd.grad``; average gradients (see ``_find_averaged_inputs``) unless inside a backward."""
        inputs: Sequence[Any] = args[3]
        if self._takes_several(outputs, args) and (exchanges := find_exchanges(outputs)):
            run = self.run if any(one.gives_whole for one in exchanges) else self._run_alone
            if run != self.run:
                self._find_averaged_inputs(outputs, inputs, args[0])  # records the inputs

            def take(roots: tuple[Tensor, ...], is_last: bool) -> Any:
                return run(outputs, (roots, args[1] if is_last else True, *args[2:]), options)

            return take_one_by_one(args[0], take)
        shared = [] if self._session.backwards.depth else self._find_averaged_inputs(outputs, inputs, args[0])
        if not shared:
            return self._run_alone(outputs, args, options)
        self._session.distributed_part = self._session.distributed_part or "torch.autograd.grad was called"
        weights = self._find_weights(outputs, inputs)
        roots, term_hooks = self._session.backwards.loss_weights.weight_gradients(
            outputs, args[0], self._session.weight
        )
        hooks = DelayedHooks()
        try:
            for i in shared:
                hooks.delay(inputs[i])
            with inside_backward(self._session):
                found = list(self._original(outputs, roots, *args[1:], **options))
        finally:
            hooks.restore()
            for hook in term_hooks:
                hook.remove()
        found = [g if g is None or i in shared or weights[i] in (0, 1) else g / weights[i] for i, g in enumerate(found)]
        averages = self._grads.average_returned(
            [inputs[i] for i in shared], [found[i] for i in shared], [weights[i] for i in shared]
        )
        hooked: dict[int, Tensor | None] = {}  # by id, since hooks of an input that is given twice are called once
        for i, average in zip(shared, averages, strict=True):
            if id(inputs[i]) not in hooked:
                hooked[id(inputs[i])] = None if average is None else hooks.run(inputs[i], average)
            found[i] = hooked[id(inputs[i])]
        return tuple(found)

    def _find_weights(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[float]:
        """Return, for each of ``inputs``, the weight by which its gradient is multiplied; a guess for a shared input.

        If terms of the loss have different weights, an input that is not shared gets that of its own batch; 1 if that
        is unknown, as a term without a known batch has.
        """
        session = self._session
        common = session.backwards.loss_weights.common_weight(outputs, session.weight)
        if common is not None:
            return [common] * len(inputs)
        shares = [session.tensors.batch_tracker.share(one) for one in inputs]
        return [1.0 if share is None else share.weight(session.world_size) for share in shares]

    def _run_alone(self, outputs: Sequence[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run ``torch.autograd.grad``; its gradients stay this rank's own."""
        with inside_backward(self._session):
            return self._original(outputs, *args, **options)

    def _takes_several(self, outputs: Sequence[Any], args: tuple[Any, ...]) -> bool:
        """Return whether the call asks for several gradients of a tensor at once."""
        if (
            self._session.backwards.depth
            or self._session.forwards.sliced_forward is not None
            or self._session.forwards.is_probing
        ):
            return False
        if not any(isinstance(root, Tensor) and is_batched(root) and root.numel() for root in args[0]):
            return False
        return not any(isinstance(one, Tensor) and is_batched(one) for one in outputs)

    def _find_averaged_inputs(self, outputs: Sequence[Any], inputs: Sequence[Any], roots: Sequence[Any]) -> list[int]:
        """Return the indices of the ``inputs`` whose gradients are averaged; record facts about the other inputs."""
        if self._session.forwards.sliced_forward is not None or self._session.forwards.is_probing:
            # In a forward that computes a block of rows, an input that a later backward reaches is this rank's own.
            own = [one for one in inputs if isinstance(one, Tensor) and one.is_leaf]
            self._session.tensors.repeated_inputs.update(
                dict.fromkeys(o for o in own if not isinstance(o, torch.nn.Parameter))
            )
            return []
        if any(is_batched(one) for one in (*inputs, *roots) if isinstance(one, Tensor)):
            # Batched calls (torch.func, is_grads_batched) usually compute gradients per sample, which are not averaged.
            plain = [_unwrap(one) for one in inputs if isinstance(one, Tensor)]
            self._divergence.add_differentiated([one for one in plain if isinstance(one, torch.nn.Parameter)])
            return []
        if passes_gather(outputs):  # then averages give the whole batch's gradients for all inputs
            return [i for i, one in enumerate(inputs) if isinstance(one, Tensor)]
        session = self._session
        session.begin_backward(outputs, [one for one in inputs if isinstance(one, Tensor) and one.is_leaf])
        shared_out = session.passes.share is not None or session.config.batches == "whole"
        return [
            i
            for i, one in enumerate(inputs)
            if isinstance(one, Tensor) and is_averaged(one, session.likeness(one), shared_out=shared_out)
        ]


@contextmanager
def inside_backward(session: Session) -> Iterator[None]:
    """Context manager in which ``session.backwards.depth`` counts one more running backward."""
    session.backwards.depth += 1
    try:
        yield
    finally:
        session.backwards.depth -= 1


def _unwrap(one: Tensor) -> Tensor:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(one):
        one = functorch.get_unwrapped(one)
    return one


_functorch = torch._C._functorch


def take_one_by_one(
    roots: Sequence[Tensor], take: Callable[[tuple[Tensor, ...], bool], Sequence[Tensor | None]]
) -> tuple[Tensor | None, ...]:
    """Return the gradients for all elements of the batch in ``roots``, with the same batch dimension.

    Args:
        roots: gradients of the outputs, at least one of them batched.
        take: returns the gradients for one element of the batch; its second argument tells whether it is the last one.
    """
    legacy = _functorch.is_legacy_batchedtensor(roots[0])
    level = _legacy_level() if legacy else _functorch.current_level()
    plain = [_remove_batch(root, level, legacy) for root in roots]
    num = next(len(one) for one, is_batched in plain if is_batched)
    with _left_vmap() if legacy else temporarily_pop_interpreter_stack():
        found = [
            take(tuple(one[i] if is_batched else one for one, is_batched in plain), i == num - 1) for i in range(num)
        ]
        stacked = [None if column[0] is None else torch.stack(column) for column in zip(*found, strict=True)]
    add: Any = torch._add_batch_dim if legacy else _functorch._add_batch_dim
    return tuple(None if one is None else add(one, 0, level) for one in stacked)


def _remove_batch(root: Tensor, level: int, legacy: bool) -> tuple[Tensor, bool]:
    """Return a batched root as a plain tensor, the batch first, and True; any other root unchanged, and False."""
    if legacy:
        return torch._remove_batch_dim(root, level, 1, 0), True
    if not _functorch.is_batchedtensor(root) or _functorch.maybe_get_level(root) != level:
        return root, False
    return _functorch.get_unwrapped(root).movedim(_functorch.maybe_get_bdim(root), 0), True


def _legacy_level() -> int:
    level: int = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


@contextmanager
def _left_vmap() -> Iterator[None]:
    torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        torch._C._vmapmode_increment_nesting()
