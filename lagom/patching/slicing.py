"""``Slicer``: forwards of which each rank computes its block of the rows, where that changes nothing but the speed."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from lagom.errors import LagomError
from lagom.patching.passes import Share
from lagom.patching.probe import Candidate, Finding, is_batch, measured, probe
from lagom.patching.recorder import NotByRowsError
from lagom.strategies.draws import Draws
from lagom.strategies.whole_batch import Block, Exchange, Gatherer, UnequalInputError, gathered, pays, sliced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lagom.patching.session import Session

_MAX_KINDS = 64
"""Kinds of input of one module, after which it is no longer looked at."""


@dataclass(eq=False)
class Region:
    """A sliced forward under way."""

    share: Share
    draws: Draws | None

    @contextmanager
    def entered(self, session: Session) -> Iterator[None]:
        """Have BatchNorm and random draws see the whole batch; once, also where it is entered again inside."""
        before = session.region
        if before is self:
            yield
            return
        session.region = self
        try:
            with self.draws or nullcontext():
                yield
        finally:
            session.region = before


class Slicer:
    """Slices the forwards of modules that compute their rows one by one, and runs others whole.

    Args:
        original: ``nn.Module.__call__``.
        outside: a context in which modules that are called count as outermost.
    """

    def __init__(self, session: Session, original: Callable[..., Any], outside: Callable[[], Any]) -> None:
        assert session.group is not None
        assert session.watch is not None
        self._session = session
        self._group = session.group
        self._gatherer = Gatherer(session.group, session.watch.meet)
        self._original = original
        self._outside = outside
        self._inside: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._findings: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._small: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._counting: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._depth = 0

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``module(*args, **kwargs)`` is; every rank has the same arguments."""
        small = self._small.get(module)
        if small is not None and args and small == (getattr(args[0], "shape", None), torch.is_grad_enabled()):
            return self._original(module, *args, **kwargs)
        inside = self._modules(module)
        leaves, spec = tree_flatten((args, kwargs))
        rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
        if not inside or rows < self._group.world_size:
            return self._original(module, *args, **kwargs)

        def run(changed: list[Any]) -> Any:
            if changed is leaves:
                return self._original(module, *args, **kwargs)
            its_args, its_kwargs = tree_unflatten(changed, spec)
            output = self._original(module, *its_args, **its_kwargs)
            after, its_spec = tree_flatten((its_args, its_kwargs))
            if its_spec != spec or any(one is not other for one, other in zip(after, changed, strict=True)):
                raise NotByRowsError("changes the lists or dicts that it is called with")
            return output

        candidate = Candidate(module, inside, run, leaves, rows, self._session.device)
        known: dict[object, Finding] = self._findings.setdefault(module, {})
        kind = _kind(candidate, spec)
        finding = known.get(kind)
        if module in self._counting:
            return self._descend(module, args, kwargs)
        if finding is None and len(known) < _MAX_KINDS:
            before = _numbers(inside)
            output, known[kind] = measured(candidate, lambda: self._original(module, *args, **kwargs))
            if _numbers(inside) != before:
                self._counting[module] = None
                self._say_whole(
                    module, "changes numbers among its attributes, by which a later call may go another way"
                )
            return output
        if finding is None or finding.reason is not None:
            return self._descend(module, args, kwargs)
        if not (finding.sliced or self._pays(finding, candidate)):
            # Known by its first argument only: to look at all of them takes longer than such a module does.
            self._small[module] = getattr(args[0], "shape", None) if args else None, torch.is_grad_enabled()
            self._say_small(module, finding)
            return self._original(module, *args, **kwargs)
        if not finding.sliced:
            self._probe(candidate, finding)
        return self._sliced(candidate, finding) if finding.sliced else self._descend(module, args, kwargs)

    def _say_small(self, module: nn.Module, finding: Finding) -> None:
        if not (finding.told or self._depth) and self._session.plan.batches == "whole" and torch.is_grad_enabled():
            self._session.say_once(
                f"{type(module).__name__} runs whole on every rank: to exchange its outputs would take longer than "
                "slicing saves"
            )
        finding.told = True

    def _descend(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``module`` whole; those inside it may be sliced."""
        self._depth += 1
        try:
            with self._outside():
                return self._original(module, *args, **kwargs)
        finally:
            self._depth -= 1

    def _modules(self, module: nn.Module) -> list[nn.Module]:
        """All modules inside one; none when it has no parameters yet, or none at all."""
        found = self._inside.get(module)
        if found is None or found.structure != _structure([module, *found.others]):
            state = [*module.parameters(), *module.buffers()]
            if any(is_lazy(tensor) for tensor in state):
                return []  # its first call makes them
            modules = list(module.modules())
            # What TorchScript runs is C++'s: whether it works row by row is not looked into.
            scripted = any(isinstance(one, torch.jit.ScriptModule) for one in modules)
            trained = not scripted and any(isinstance(tensor, nn.Parameter) for tensor in state)
            if scripted:
                self._say_whole(module, "is TorchScript, into which lagom does not look")
            found = self._inside[module] = _Inside(trained, modules[1:], _structure(modules))
        return [module, *found.others] if found.trained else []

    def _probe(self, candidate: Candidate, finding: Finding) -> None:
        with self._session.probing():
            probe(candidate, finding, self._group.world_size, self._session.statistics)
        name = type(candidate.module).__name__
        self._session.at(f"the second call of {name} with inputs of a kind")
        reasons = [part.decode() for part in self._group.all_gather_bytes((finding.reason or "").encode())]
        finding.reason = next(filter(None, reasons), None)
        finding.sliced = finding.reason is None
        if finding.reason is not None:
            self._say_whole(candidate.module, finding.reason)

    def _say_whole(self, module: nn.Module, reason: str) -> None:
        if not self._depth:
            self._session.say_once(
                f"{type(module).__name__} runs whole on every rank, which is right but not faster: it {reason}"
            )

    def _pays(self, finding: Finding, candidate: Candidate) -> bool:
        return pays(
            finding.flops * candidate.rows / finding.rows,
            finding.num_bytes * candidate.rows / finding.rows,
            self._group.world_size,
            candidate.device,
            training=torch.is_grad_enabled(),
            shares_memory=self._group.shares_memory,
        )

    def _sliced(self, candidate: Candidate, finding: Finding) -> Any:
        session = self._session
        block = Block(self._group.rank, self._group.world_size, candidate.rows)
        exchange = Exchange(self._gatherer, block, f"the output of {type(candidate.module).__name__}")
        leaves = [sliced(leaf, exchange) if is_batch(leaf, candidate.rows) else leaf for leaf in candidate.leaves]
        region = Region(
            Share(block.num_mine, block.num_all, block.even), Draws(block, finding.axes) if finding.axes else None
        )
        before = torch.default_generator.get_state() if region.draws is None else None
        with region.entered(session):
            outputs, spec = tree_flatten(candidate.run(leaves))
        if before is not None and not torch.equal(before, torch.default_generator.get_state()):
            finding.reason = "draws random numbers only now and then"
            session.drew_unevenly(before)
        if spec != finding.spec:
            raise LagomError(
                f"the forward of {type(candidate.module).__name__} gave outputs of another structure than at its first "
                "call; use batches='split' and evaluation='replicated' for this program"
            )
        try:
            return tree_unflatten(self._gathered(outputs, finding, exchange, candidate), spec)
        except UnequalInputError:
            if session.plan.batches == "whole":
                raise
            # An evaluation that calls a model with a share of a training batch.
            finding.reason = "was called with other inputs on other ranks"
            return candidate.run(candidate.leaves)

    def _gathered(self, outputs: list[Any], finding: Finding, exchange: Exchange, candidate: Candidate) -> list[Any]:
        indices = [i for i, factor in enumerate(finding.factors) if factor is not None]
        factors = [factor for factor in finding.factors if factor is not None]
        blocks = [outputs[i] for i in indices]
        for one, factor in zip(blocks, factors, strict=True):
            if not isinstance(one, torch.Tensor) or one.dim() == 0 or one.shape[0] != factor * exchange.block.num_mine:
                raise LagomError(
                    f"the forward of {type(candidate.module).__name__} gave an output that has not a row for each "
                    "sample, unlike at its first call; use batches='split' and evaluation='replicated' for this program"
                )
        signed = b"".join(_glimpse(leaf) for leaf in candidate.leaves if is_batch(leaf, candidate.rows))
        wholes = gathered(blocks, exchange, factors, signed)
        for i, one, whole in zip(indices, blocks, wholes, strict=True):
            outputs[i] = whole if one.requires_grad else whole.detach()
        return outputs


class _Inside(NamedTuple):
    """What is inside a module."""

    trained: bool
    """It has parameters, and is no TorchScript."""
    others: list[nn.Module]
    """All its modules but itself: what holds its own key is never let go of."""
    structure: object


def _structure(modules: list[nn.Module]) -> object:
    """Another one when any of ``modules`` has got other modules."""
    return [tuple(map(id, module.__dict__["_modules"].values())) for module in modules]


def _kind(candidate: Candidate, spec: TreeSpec) -> object:
    """Equal for calls that the same finding holds for."""
    leaves = tuple(
        (leaf.dim(), leaf.dtype, leaf.requires_grad, is_batch(leaf, candidate.rows))
        if isinstance(leaf, torch.Tensor)
        else (leaf if isinstance(leaf, (bool, int, str, type(None))) else type(leaf))
        for leaf in candidate.leaves
    )
    states = tuple(map(_state, candidate.inside))
    return spec, leaves, states, torch.is_grad_enabled(), torch.is_autocast_enabled(candidate.device.type)


def _state(module: nn.Module) -> object:
    """What of a module's attributes may have its forward take another way: modes, hooks, and whatever is its own."""
    state = module.__dict__
    hooked = [name for name in _HOOKS if state.get(name)]
    # An id, for it may be replaced; with the type, since ids are used again.
    own = [
        (name, value if type(value) in _PLAIN else (id(value) if callable(value) else type(value)))
        for name, value in state.items()
        if name not in _EVERYONES
    ]
    watched = [p is not None and bool(p._backward_hooks) for p in state["_parameters"].values()]
    parts = [(id(part), type(part)) for part in state["_modules"].values()]
    return type(module), module.training, tuple(hooked), tuple(own), tuple(watched), tuple(parts)


def _numbers(modules: list[nn.Module]) -> object:
    """The numbers among the attributes of ``modules``."""
    return [
        {name: value for name, value in module.__dict__.items() if type(value) in (int, float)} for module in modules
    ]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_EVERYONES = frozenset(vars(nn.Module()))
_PLAIN = frozenset((bool, int, float, str, type(None)))


def _glimpse(tensor: torch.Tensor) -> bytes:
    """Some of the numbers in ``tensor``."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return b""
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach()[0].reshape(-1)
    some = flat[:: max(1, len(flat) // 61)][:64]
    return bytes(some.contiguous().view(torch.uint8).numpy().data)
