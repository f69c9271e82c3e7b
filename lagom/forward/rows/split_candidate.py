"""``SplitCandidate`` and ``SplitFinding``: a call that ranks might split by rows, and facts about such calls."""

from __future__ import annotations

import io
import warnings
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from lagom.forward.rows.draws import DrawKind
from lagom.forward.rows.input_reads import InputReads, Shapes, shapes_of
from lagom.forward.rows.recorder import BatchStatistics, FlopCounter, bounds_check
from lagom.forward.rows.restore import ChangedError, restored_state
from lagom.forward.rows.row_places import find_places
from lagom.forward.rows.whole_batch import ForwardWork, RowBlock
from lagom.forward.rows.whole_reasons import FilledReason, NotByRowsError, WholeReason
from lagom.inspection.reads import class_name, describe, is_tensor
from lagom.inspection.structures import flatten, unflatten
from lagom.run_state.oom_errors import wanted_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from lagom.forward.rows.inner_losses import InnerLoss
    from lagom.forward.rows.row_places import RowPlace
    from lagom.forward.rows.whole_calls import CallAccount

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of arguments and outputs that cannot contain rows of the batch."""
_MAX_SHAPES = 1024
"""Number of input shapes after which a finding forgets its ``branches``."""


@dataclass(frozen=True)
class SplitCandidate:
    """A call of a module that might be sliced."""

    module: nn.Module
    inside: Sequence[nn.Module]
    """The module and all modules inside it."""
    run: Callable[[list[Any]], Any]
    """Calls the module with the given leaves in place of ``leaves``."""
    leaves: list[Any]
    """Tensors and other values of the arguments, in the order in which ``spec`` puts them together."""
    spec: Any
    """Structure of the arguments."""
    rows: int
    """Rows of the batch: leaves with this number of rows are sliced."""
    device: torch.device
    check: Callable[[], None] = lambda: None
    """Called after each call of ``run``, to check its effects."""
    is_common: bool = False
    """Whether all ranks have the same arguments, and each will run one block."""
    turned: tuple[bool, ...] = ()
    """For each of ``leaves`` whether it is turned: the module has its rows in the second dimension; empty if none is.
    """

    def turn(self, num_blocks: int) -> SplitCandidate | None:
        """Return the same call with the rows of the second dimension; None if not every block would have two of them.

        See Note [Other dimensions] in row_places.py.
        """
        first = next(leaf for leaf in self.leaves if is_tensor(leaf) and leaf.dim())
        rows = first.shape[1] if first.dim() > 1 and is_dense(first) else 0
        if rows < 2 * num_blocks:
            return None
        turned = tuple([is_dense(leaf) and leaf.dim() > 1 and leaf.shape[1] == rows for leaf in self.leaves])
        leaves = [leaf.transpose(0, 1) if turns else leaf for leaf, turns in zip(self.leaves, turned, strict=True)]

        def run(changed: list[Any]) -> Any:
            return self.run(list(map(_turn_back, changed, leaves, turned)))

        return replace(self, run=run, leaves=leaves, rows=rows, turned=turned)

    def outputs(self, leaves: list[Any], places: Sequence[RowPlace | None]) -> tuple[list[Any], Any]:
        """Call the module with ``leaves``; return its outputs, with the rows in the first dimension, and their spec.

        Args:
            places: where each output has its rows; empty if all have them in the first dimension.
        """
        outputs, spec = flatten(self.run(leaves))
        if not any(places):
            return outputs, spec
        rows = next(one.shape[0] for one, leaf in zip(leaves, self.leaves, strict=True) if is_batch(leaf, self.rows))
        first: dict[int, Any] = {}  # a module may return one tensor twice
        for one, place in zip(outputs, places, strict=False):
            if place is not None and place.fits(one, rows):
                first[id(one)] = place.bring_first(one, rows)
        return [first.get(id(one), one) for one in outputs], spec

    @property
    def is_uniform(self) -> bool:
        """Return whether all rows are equal: a mean over equal rows equals each of them, so a probe shows nothing."""
        batches = [leaf for leaf in self.leaves if is_batch(leaf, self.rows)]
        return self.rows > 1 and bool(batches) and all(bool((leaf == leaf[:1]).all()) for leaf in batches)

    def shapes_for(self, rows: int) -> Shapes:
        """Return the shapes of ``leaves`` for a call with another number of rows."""
        return tuple(
            [
                (rows, *leaf.shape[1:]) if is_batch(leaf, self.rows) else shape
                for leaf, shape in zip(self.leaves, shapes_of(self.leaves), strict=True)
            ]
        )

    def cut_leaves(self, block: RowBlock) -> list[Any]:
        """Return ``leaves`` for a call with the rows of ``block`` only."""
        return [
            like_given(block.of(leaf.detach()), leaf) if is_batch(leaf, self.rows) else leaf for leaf in self.leaves
        ]


@dataclass
class SplitFinding:
    """Facts about a module's forward on inputs of one kind."""

    work: ForwardWork
    """Work of the first call (with micro-batches, only the rows of the probe)."""
    spec: Any = None
    """Structure of the outputs."""
    shapes: list[tuple[int, ...] | None] = field(default_factory=list)
    """Shape of each output of the first call; None for one that is no tensor."""
    turned: tuple[bool, ...] = ()
    """``SplitCandidate.turned`` of the calls that are sliced."""
    places: list[RowPlace | None] = field(default_factory=list)
    """Where each output has its rows; None for one that has them in the first dimension, or has none."""
    factors: list[int | None] = field(default_factory=list)
    """Rows of each output per row of the batch; None for one that is no tensor, or is not computed from the input."""
    orders: list[tuple[int, ...] | None] = field(default_factory=list)
    """Dimensions of each output in the order of memory; None if memory has them in order."""
    bases: list[int | None] = field(default_factory=list)
    """For each output the index of the output that it is a view of; None if it has its own memory."""
    axes: dict[DrawKind, int | None] = field(default_factory=dict)
    """Row dimensions of the random draws; see ``Draws``."""
    multiples: set[DrawKind] = field(default_factory=set)
    """Kinds of draws with several rows for each row of the batch."""
    reads: list[object] = field(default_factory=list)
    """Numbers of a buffer, a draw or another tensor that the forward read, by which it may have chosen its way."""
    input_reads: InputReads = field(default_factory=InputReads)
    """Operations that lead to the reads of the input, for which ``reads`` has an ``InputRead``."""
    losses: list[InnerLoss | None] = field(default_factory=list)
    """Losses of the batch among torch's losses that the forward computes, in their order; None for other losses."""
    needs_mode: bool = False
    """Whether only a dispatch mode sees all draws and reads as the probe did; see Note [Watched operations] in
    watched_operations.py."""
    makes_leaves: bool = False
    """Whether the forward makes leaves; see Note [Leaves that a forward makes] in backward_probe.py."""
    changes_buffers: bool = False
    """Whether the forward has changed buffers."""
    branches: dict[object, set[int]] = field(default_factory=dict)
    """Numbers of autograd nodes that sliced calls have made, by the shapes of their inputs."""
    num_new_branches: int = 0
    """Number of branches that the forward has taken beside the first one."""
    num_mismatches: int = 0
    """Number of sliced calls that took another branch, less the number of other sliced calls; at least 0."""
    reason: FilledReason | None = None
    """Reason for which the forward runs whole on every rank; None if it is sliced, or not probed yet."""
    failure: FilledReason | None = None
    """Reason for which the forward cannot be called again as a probe; None if it can."""
    sliced: bool = False
    """Whether the probe has shown that the forward computes its rows one by one."""
    repeats: bool = False
    """Whether the probe has shown that the forward changes no state, so that it can be repeated."""

    def is_known_branch(self, shapes: object, num_nodes: int) -> bool:
        """Return whether ``num_nodes`` is a known number of nodes for ``shapes``; the first number becomes known."""
        if len(self.branches) > _MAX_SHAPES:
            self.branches.clear()
        return num_nodes in self.branches.setdefault(shapes, {num_nodes})


@dataclass
class KnownCalls:
    """Facts about the calls of one module."""

    findings: dict[Any, SplitFinding] = field(default_factory=dict)
    """Finding for each kind of call."""
    small: object = None
    """First argument's shape, and whether gradients are on, of calls that run whole without checks; None if none do."""
    num_changes: int = 0
    """Number of first calls that changed values they can see, or parameters; one call may do so to fill a cache."""
    change: FilledReason | None = None
    """What the last of these calls changed."""
    accounts: dict[WholeReason, CallAccount] = field(default_factory=dict)
    """Calls that ran whole, by their reason; not part of a snapshot."""
    small_account: AbstractContextManager[None] | None = None
    """Account of calls without checks; None before the first one. Not part of a snapshot."""

    def without_findings(self) -> KnownCalls:
        """Return the facts of a snapshot that belong to no finding."""
        return replace(self, findings={}, accounts={}, small_account=None)


def _turn_back(part: Any, turned: Any, turns: bool) -> Any:
    """Return ``part``, rows of the ``turned`` leaf, as the module takes it: contiguous if the leaf is."""
    if not turns:
        return part
    back = part.transpose(0, 1)
    return back.contiguous() if turned.transpose(0, 1).is_contiguous() else back


def like_given(copy: Tensor, leaf: Tensor) -> Tensor:
    """Return ``copy``; if ``leaf`` needs a gradient, a view of it that does too: a leaf cannot be changed in place."""
    return copy.requires_grad_().view_as(copy) if leaf.requires_grad and torch.is_grad_enabled() else copy


def is_batch(leaf: Any, rows: int) -> bool:
    """Return whether ``leaf`` is a tensor with a row for each sample."""
    return is_dense(leaf) and leaf.dim() > 0 and leaf.shape[0] == rows


def is_dense(leaf: Any) -> bool:
    """Return whether ``leaf`` is a tensor that can be cut into rows: a strided one, neither sparse nor nested."""
    return is_tensor(leaf) and leaf.layout == torch.strided and not leaf.is_nested


def is_dual(leaf: Any) -> bool:
    """Return whether ``leaf`` carries a derivative in forward mode."""
    return is_tensor(leaf) and forward_ad.unpack_dual(leaf).tangent is not None


_NUMPY_TYPES = frozenset((torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool))


def sample_bytes(tensor: torch.Tensor) -> bytes:
    """Return some elements of ``tensor`` as bytes; none of a tensor on a GPU."""
    if tensor.device.type != "cpu" or not tensor.numel():
        return b""
    # numpy takes a seventh of the time that torch takes for so few elements.
    if tensor.dtype in _NUMPY_TYPES and tensor.is_contiguous() and not tensor.is_neg():
        values = tensor.detach().numpy().reshape(-1)
        sample: bytes = values[:: max(1, len(values) // 61)][:64].tobytes()
        return sample
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach()[0].reshape(-1)
    some = flat[:: max(1, len(flat) // 61)][:64]
    # A copy: a single number is contiguous whatever its stride, and bytes must lie side by side.
    return bytes(some.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().data)


def measure_call(candidate: SplitCandidate, call: Callable[[], Any]) -> tuple[Any, SplitFinding]:
    """Make the ``call``; return its output and a finding with its amount of work."""
    with FlopCounter() as counter:
        output = call()
    outputs = flatten(output)[0]
    parameters = list(candidate.module.parameters())
    own = sum(parameter.numel() for parameter in parameters)
    work = ForwardWork(
        rows=candidate.rows,
        flops=max(counter.flops, 2.0 * own * candidate.rows),
        output_bytes=sum(leaf.nbytes for leaf in outputs if is_dense(leaf)),
        input_bytes=sum(
            leaf.nbytes for leaf in candidate.leaves if is_batch(leaf, candidate.rows) and leaf.requires_grad
        ),
        parameter_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        num_batchnorms=counter.num_batchnorms,
    )
    return output, SplitFinding(work, shapes=list(shapes_of(outputs)))


def try_again(
    candidate: SplitCandidate, finding: SplitFinding, num_blocks: int, statistics: Callable[[BatchStatistics], Any]
) -> FilledReason | None:
    """Call a module once more on a part of its batch, restore its state, and return the reason for a failure.

    The shapes of the outputs show where they have their rows, which is noted in ``finding``.
    Return None if the call succeeds or lacks memory, or if ``check_call`` refuses it. The state is that of
    ``restored_state``: parameters are not restored.

    A library may refuse to be called twice between two steps (Pyro does). Such a module fails here, after the
    program's own call; a probe before that call would make the program's call fail.
    """
    try:
        check_call(candidate)
    except NotByRowsError:
        return None  # a probe will say so
    # The block has at least two rows, as BatchNorm needs.
    block = RowBlock(0, max(1, min(num_blocks, candidate.rows // 2)), candidate.rows)
    leaves = [leaf.clone() if is_tensor(leaf) else leaf for leaf in candidate.cut_leaves(block)]
    try:
        with (
            restored_state(candidate.module, candidate.inside, opens=False),
            statistics(BatchStatistics()),
            silent(),
            bounds_check(candidate.device),
        ):
            parts = shapes_of(flatten(candidate.run(leaves))[0])
    except ChangedError:
        raise
    except NotByRowsError as error:
        return error.reason
    except Exception as error:
        return WholeReason.FAILS_ON_PART.filled(error=describe(error)) if wanted_bytes(error) is None else None
    finding.places = find_places(finding.shapes, parts, candidate.rows, block.num_mine, is_turned=any(candidate.turned))
    return None


@contextmanager
def failing_as(reason: WholeReason) -> Iterator[None]:
    """Let errors of a forward, except for memory, be a ``NotByRowsError`` with this ``reason``."""
    try:
        yield
    except (NotByRowsError, ChangedError):
        raise
    except Exception as error:
        if wanted_bytes(error) is not None:
            raise
        raise NotByRowsError(reason, error=describe(error)) from error


def check_call(candidate: SplitCandidate) -> None:
    """Check that nothing else would see a part of the batch, such as a hook, and that all arguments can be cut.

    Raises:
        NotByRowsError: when something would, or might.
    """
    if any(map(_is_packed, tree_leaves(unflatten(candidate.leaves, candidate.spec), is_leaf=_is_packed))):
        raise NotByRowsError(WholeReason.PACKED_SEQUENCE)
    for leaf in candidate.leaves:
        if not is_tensor(leaf) and not issubclass(type(leaf), PLAIN):
            raise NotByRowsError(WholeReason.UNKNOWN_ARGUMENT, name=class_name(leaf))
        if is_tensor(leaf) and not is_dense(leaf):
            raise NotByRowsError(WholeReason.IRREGULAR_ARGUMENT)
    for module in candidate.inside:
        state = module.__dict__
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            if any(not _is_from_torch(hook) for hook in (state.get(kind) or {}).values()):
                raise NotByRowsError(WholeReason.HAS_HOOKS)
        for parameter in (state.get("_parameters") or {}).values():
            if parameter is not None and parameter._backward_hooks:
                raise NotByRowsError(WholeReason.HAS_GRADIENT_HOOKS)
    if has_global_hooks():
        raise NotByRowsError(WholeReason.GLOBAL_HOOKS)


def _is_packed(value: object) -> bool:
    return issubclass(type(value), PackedSequence)


def has_global_hooks() -> bool:
    """Return whether there are hooks that torch calls for all modules."""
    everywhere = torch.nn.modules.module
    return bool(
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )


def _is_from_torch(hook: object) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__ or "").startswith("torch.")


@contextmanager
def silent() -> Iterator[io.StringIO]:
    """Collect the text that is printed inside the context, and show no warnings."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield said
