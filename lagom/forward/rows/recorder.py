"""``Recorder``: record the operations of a forward. See Note [Probe] in probe.py."""

from __future__ import annotations

import functools
import math
import sys
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes as disabled_modes

from lagom.accelerators import is_accelerator
from lagom.forward.rows.draws import (
    Answer,
    DrawKind,
    OperationMode,
    draw_block,
    draw_shape,
    draws_random_numbers,
    leaves_in,
    read_numbers,
    reads_numbers,
    tensors_in,
    written_tensors,
)
from lagom.forward.rows.input_reads import InputReads, InputReadsRecorder
from lagom.forward.rows.whole_reasons import NotByRowsError, WholeReason
from lagom.patching.replace import replaced
from lagom.patching.watched_operations import TAGS, register_kernels, watched
from lagom.run_state.memory_layout import storage_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

    from lagom.forward.rows.whole_batch import RowBlock


_SCALING = frozenset(f"aten::{name}{end}" for name in ("mul", "div", "add", "sub") for end in ("", "_"))
"""Operations that may divide rows by their number."""
_MAX_NOTED = 64
"""Elements of a tensor up to which its numbers are noted, and not only its shape."""


class FlopCounter(OperationMode):
    """Counts the floating-point operations of a forward's matrix products and convolutions, and its BatchNorms."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.num_batchnorms = 0
        """Calls of BatchNorm that use the statistics of the batch."""

    def run(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and count it."""
        from torch.utils.flop_counter import flop_registry

        result = function(*args, **kwargs)
        count = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.flops += float(count(*args, **kwargs, out_val=result))
        if function._schema.name in _BATCHNORMS:
            self.num_batchnorms += bool(args[5] if len(args) > 5 else kwargs.get("training"))
        return result


_BATCHNORMS = frozenset(f"aten::{name}" for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))


class BoundsCheck(OperationMode):
    """Raises what a CPU raises for indices and numbers out of bounds; an accelerator would end all work of the process.

    A probe runs a forward on parts of its batch and on a row of NaN, where indices that the program computes may be
    wrong.
    """

    def run(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check the arguments of an operation, and run it."""
        name = function._schema.name.removeprefix("aten::").rstrip("_")
        if name in _BY_DIMENSION:
            size = args[0].shape[args[1]] if args[0].dim() else 1
            _check_indices(args[2], -size if name == "index_fill" else 0, size)
        elif name in _BY_DIMENSIONS:
            _check_each_index(args[1], args[0].shape)
        elif name in _OF_ROWS:
            _check_indices(args[1], 0, args[0].shape[0])
            if len(args) > 2 and isinstance(args[2], torch.Tensor):
                _check_indices(args[2], 0, args[1].numel() + 1)  # offsets of bags
        elif name in ("take", "put"):
            _check_indices(args[1], -args[0].numel(), args[0].numel())
        elif name in _OF_CLASSES:
            scores, targets = args[0], args[1]
            if name.startswith("nll"):
                targets = targets[targets != args[4]]  # those that are not ignored
            _check_indices(targets, 0, scores.shape[min(1, scores.dim() - 1)])
        elif name in _OF_SEQUENCES:
            sizes = args[_place_of_sizes(function)]
            if sizes and sum(sizes) != args[0].shape[0]:
                raise RuntimeError(f"a packed sequence has {args[0].shape[0]} steps, and its sizes make {sum(sizes)}")
        elif name == "masked_scatter":
            if int(args[1].expand(args[0].shape).sum()) > args[2].numel():
                raise RuntimeError("masked_scatter() gets fewer numbers than its mask has places")
        elif name in _OF_PROBABILITIES and function._overloadname in ("default", "Tensor", ""):
            _check_probabilities(name, args[1] if function._overloadname == "Tensor" else args[0])
        return function(*args, **kwargs)


_BY_DIMENSION = frozenset(
    (
        *("gather", "index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
        *("scatter", "scatter_add", "scatter_reduce"),
    )
)
"""Operations of a tensor, a dimension and an index along it."""
_BY_DIMENSIONS = frozenset(("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"))
"""Operations of a tensor and a list with an index, a mask or None for each dimension."""
_OF_ROWS = frozenset(("embedding", "_embedding_bag", "_embedding_bag_forward_only", "embedding_renorm"))
_OF_CLASSES = frozenset(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"))
_OF_SEQUENCES = frozenset(("_cudnn_rnn", "miopen_rnn"))
"""Recurrent layers of NVIDIA's and AMD's libraries. See Note [Packed sequences]."""
_OF_PROBABILITIES = {"bernoulli": 1.0, "binary_cross_entropy": 1.0, "multinomial": math.inf, "poisson": math.inf}
"""Operations of probabilities, weights or rates, and what these may not exceed."""


@functools.cache
def _place_of_sizes(function: OpOverload) -> int:
    return [argument.name for argument in function._schema.arguments].index("batch_sizes")


def _check_each_index(indices: Sequence[Tensor | None], shape: Sequence[int]) -> None:
    place = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            place += index.dim()  # torch compares the shape of a mask
            continue
        if index is not None:
            _check_indices(index, -shape[place], shape[place])
        place += 1


def _check_indices(indices: Tensor, least: int, stop: int) -> None:
    if indices.is_meta or indices.is_nested or not indices.numel():
        return
    if not least <= int(indices.min()) <= int(indices.max()) < stop:
        raise IndexError(f"an index is not from {least} to {stop - 1}")


def _check_probabilities(name: str, given: Tensor) -> None:
    is_valid = given.ge(0) & given.le(_OF_PROBABILITIES[name])  # neither for NaN
    if name == "multinomial":
        is_valid &= given.isfinite() & (given.sum(-1, keepdim=True) > 0)
    if not given.is_meta and not bool(is_valid.all()):
        raise RuntimeError(f"{name}() gets a number that is no probability")


def bounds_check(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that checks bounds where operations on ``device`` do not raise."""
    return BoundsCheck() if is_accelerator(device) else nullcontext()  # type: ignore[no-untyped-call]


class BatchStatistics:
    """BatchNorm in a probe: statistics of the whole batch are recorded, then used for its blocks."""

    def __init__(self) -> None:
        self.noted: list[tuple[Tensor, Tensor]] = []
        """Mean and biased variance of each BatchNorm in the run on the whole batch."""
        self.running: list[Tensor] = []
        """BatchNorm's running values, which may differ between a block and the batch; the probe restores them."""
        self.is_noting = False
        """Whether a BatchNorm of the run on the whole batch is in progress."""
        self._replayed: Iterator[tuple[Tensor, Tensor]] | None = None

    def replay(self) -> None:
        """Let ``next`` return the recorded statistics from now on, beginning with the first."""
        self._replayed = iter(self.noted)

    @property
    def replays(self) -> bool:
        """Return whether statistics are replayed; False in the first run, which records them."""
        return self._replayed is not None

    def next(self) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance for the next BatchNorm of a run.

        Raises:
            NotByRowsError: when the first run had fewer BatchNorms.
        """
        assert self._replayed is not None
        found = next(self._replayed, None)
        if found is None:
            raise NotByRowsError(WholeReason.MORE_BATCHNORMS)
        return found


class Recorder(OperationMode):
    """Records a forward's draws and the results that come from its input; refuses reads of the input's values.

    Args:
        inputs: the tensors of the input.
        parameters: the module's parameters.
        input_reads: records the reads of the input that are not refused; None if all are.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        parameters: Iterable[Tensor],
        input_reads: InputReadsRecorder | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._input_reads = input_reads
        self.has_checkpoints = False
        """Whether a part of the forward is computed again in the backward."""
        self.drawn: list[tuple[DrawKind, tuple[int, ...]]] = []
        self.reads: list[object] = []
        """Values and shapes that were read from tensors, none of them computed from the input."""
        self._seen: list[OpOverload] = []
        """Operations that draw or read, in their order, as this mode sees them."""
        self._watched: list[OpOverload] = []
        """The same, as ``watched`` sees them."""
        self._of_input: dict[int, StorageWeakRef] = {}
        self._of_losses: dict[int, StorageWeakRef] = {}
        """Memory of losses of the whole batch, and of what is computed from them."""
        self.numbers: set[str] = set()
        """Operations on losses and their results, and those that scale rows, with their numbers: none may follow from
        the number of rows, also where the loss that it divides is zero in the probe."""
        self._given = {_storage_key(tensor) for tensor in inputs}
        self._parameters = {_storage_key(parameter) for parameter in parameters} - {0}
        for tensor in inputs:
            self._record_result(tensor, self._of_input)

    def run(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record it."""
        # The profile function of ``_refused_node_hooks`` looks at the program's calls, and not at those below.
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            return self._recorded(function, args, kwargs)
        finally:
            sys.setprofile(profile)

    def _recorded(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not TAGS.isdisjoint(function.tags):
            self._seen.append(function)
        tensors = tensors_in((*args, *kwargs.values()))
        memory = list(map(_storage_key, tensors))
        follows = any(key in self._of_input for key in memory)
        reads = reads_numbers(function, args)
        if follows and reads:
            return self.read(function, args, kwargs)
        of_losses = any(key in self._of_losses for key in memory) if self._of_losses else False
        if of_losses and reads:
            raise NotByRowsError(WholeReason.READS_LOSS)
        if of_losses or (follows and function._schema.name in _SCALING):
            self._note_numbers(function, args, kwargs, of_losses=of_losses)
        if of_losses and follows:  # its gradient would be that of a rank's rows
            raise NotByRowsError(WholeReason.ROWS_OF_LOSS)
        written = written_tensors(function, args, kwargs)
        if any(_storage_key(tensor) in self._parameters for tensor in written):
            # Raise before the operation runs, since no copy is kept from which the parameter could be restored.
            raise NotByRowsError(WholeReason.CHANGES_PARAMETERS)
        if draws_random_numbers(function, args, kwargs):
            result = self.draw(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        if self._input_reads is not None:
            self._input_reads.record(function, args, kwargs, result, tensors, written)
        if reads:
            self.reads.append(read_numbers(result))
        if follows or of_losses:
            for tensor in tensors_in((result, written)):
                self._record_result(tensor, self._of_input if follows else self._of_losses)
        return result

    def read(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that reads numbers of the input, and record it.

        Raises:
            NotByRowsError: if the numbers of the whole batch could not be found before a call.
        """
        refused = NotByRowsError(WholeReason.READS_INPUT, operation=function)
        if self._input_reads is None:
            raise refused
        result = function(*args, **kwargs)
        found = self._input_reads.read(function, args, result)
        if found is None:
            raise refused
        self.reads.append(found)
        return result

    def _note_numbers(
        self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, of_losses: bool
    ) -> None:
        """Note the numbers among the arguments of an operation; of one on rows no tensors with dimensions."""
        numbers = []
        for leaf in leaves_in((*args, *kwargs.values())):
            if not isinstance(leaf, torch.Tensor):
                numbers.append(repr(leaf))
            elif self._is_other(leaf) and (of_losses or not leaf.dim()):
                with disabled_modes():
                    numbers.append(
                        repr(leaf.tolist() if leaf.numel() <= _MAX_NOTED and not leaf.is_meta else leaf.shape)
                    )
        self.numbers.add(f"{function}({', '.join(numbers)})")

    def _is_other(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is computed neither from the input nor from losses."""
        key = _storage_key(tensor)
        return tensor.layout == torch.strided and key not in self._of_input and key not in self._of_losses

    def draw(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that draws, and record its kind and shape."""
        shape = draw_shape(function, args, kwargs)
        self.drawn.append(((str(function), len(shape)), shape))
        return function(*args, **kwargs)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager in which operations are recorded."""

        def watch(function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._watched.append(function)
            return function(*args, **kwargs)

        register_kernels()
        with self, watched(watch):
            yield

    @property
    def needs_mode(self) -> bool:
        """Return whether ``watched`` sees other operations than a dispatch mode."""
        return self._seen != self._watched

    def follows_input(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` was computed from the input."""
        return _storage_key(tensor) in self._of_input

    def is_constant(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` comes from inputs without gradient alone, so that its numbers may be read."""
        return self._input_reads is not None and self._input_reads.knows([tensor])

    def count_as_whole(self, tensor: Tensor) -> None:
        """Count ``tensor``, a loss of the whole batch, as not computed from the input; it must not be read either."""
        self._of_input.pop(_storage_key(tensor), None)
        self._of_losses.setdefault(_storage_key(tensor), StorageWeakRef(storage_of(tensor)))

    @contextmanager
    def refuse_reads(self) -> Iterator[None]:
        """Refuse to let a forward take values of its input out of torch, or set hooks, which cannot be tracked."""
        with ExitStack() as stack:
            for name in ("numpy", "tolist", "__dlpack__"):
                stack.enter_context(replaced(torch.Tensor, name, self._make_refused_read(getattr(torch.Tensor, name))))
            stack.enter_context(replaced(torch.Tensor, "register_hook", _refuse_hook))
            stack.enter_context(replaced(saved_tensors_hooks, "__enter__", self._make_entered_packing()))
            stack.enter_context(_refused_node_hooks())
            yield

    def _make_entered_packing(self) -> Callable[[saved_tensors_hooks], None]:
        def enter(hooks: saved_tensors_hooks) -> None:
            if type(hooks) is saved_tensors_hooks:  # torch's own hooks (of checkpoints) are of subclasses
                raise NotByRowsError(WholeReason.PACKS)
            self.has_checkpoints = True
            _enter_hooks(hooks)

        return enter

    def input_reads(self) -> InputReads:
        """Return the reads of the input, and the operations that lead to them.

        Raises:
            NotByRowsError: if they cannot be repeated before each call.
        """
        if self._input_reads is None:
            return InputReads()
        reads = self._input_reads.finish()
        if reads is None or (reads.reads and self.has_checkpoints):
            raise NotByRowsError(WholeReason.READS_AT_LENGTH)
        return reads

    def _make_refused_read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.follows_input(tensor):
                raise NotByRowsError(WholeReason.READS_OUT_OF_TORCH)
            return original(tensor, *args, **kwargs)

        return read

    def keeps_results(self, known: Iterable[Tensor]) -> bool:
        """Return whether the program keeps anything computed from the input, except ``known``."""
        expected = self._given.union(_storage_key(tensor) for tensor in known)
        return any(not ref.expired() for key, ref in self._of_input.items() if key not in expected)

    def _record_result(self, tensor: Tensor, known: dict[int, StorageWeakRef]) -> None:
        # The reference keeps the address from being reused, without keeping the elements.
        if tensor.layout == torch.strided and _storage_key(tensor) not in known:
            known[_storage_key(tensor)] = StorageWeakRef(storage_of(tensor))


def _refuse_hook(*_: Any) -> Any:
    raise NotByRowsError(WholeReason.SETS_HOOK)


@contextmanager
def _refused_node_hooks() -> Iterator[None]:
    """Refuse to let a forward set hooks on nodes of the graph; C++ keeps these hooks, and cannot list them."""

    def watch(_: object, event: str, called: Any) -> None:
        is_hook = event == "c_call" and called.__name__ in ("register_hook", "register_prehook")
        if is_hook and isinstance(called.__self__, Node):
            _refuse_hook()

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


_enter_hooks = saved_tensors_hooks.__enter__


class AnsweredReads(OperationMode):
    """Lets a forward read the numbers of the whole batch: ``reads`` are those of its probe, with each ``Answer``."""

    def __init__(self, reads: Sequence[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = iter(reads)

    def run(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; return the answer in place of what it reads."""
        result = function(*args, **kwargs)
        found = next(self._reads, None) if reads_numbers(function, args) else None
        return found.whole if isinstance(found, Answer) else result


class CallRecorder(Recorder):
    """Records the reads of a program's own call, and refuses nothing."""

    def read(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that reads numbers of the input, and record it if it can be repeated."""
        result = function(*args, **kwargs)
        if self._input_reads is not None and self._input_reads.read(function, args, result) is None:
            self._input_reads = None
        return result

    def found(self) -> InputReads | None:
        """Return the reads of the input; None if they cannot be repeated."""
        return None if self._input_reads is None else self._input_reads.finish()


class BlockRecorder(Recorder):
    """Records the forward of a block, and finds the row dimension of each draw by comparison with the whole run."""

    def __init__(
        self,
        inputs: Sequence[Tensor],
        parameters: Iterable[Tensor],
        block: RowBlock,
        whole: list[tuple[DrawKind, tuple[int, ...]]],
        axes: dict[DrawKind, int | None],
        answers: Sequence[object] = (),
        input_reads: InputReadsRecorder | None = None,
    ) -> None:
        super().__init__(inputs, parameters, input_reads)
        self._answers = iter([one for one in answers if isinstance(one, Answer)])
        self._block = block
        self._whole = iter(whole)
        self._axes = axes
        self.multiples: set[DrawKind] = set()
        """Kinds of draws with several rows for each row of the batch."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager in which operations are recorded; the run on the whole batch has shown ``needs_mode``."""
        with self:
            yield

    def read(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the number of the whole batch in place of the number of the block."""
        super().read(function, args, kwargs)
        found = next(self._answers, None)
        if found is None:
            raise NotByRowsError(WholeReason.READS_OTHERS)
        return found.whole

    def draw(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw for the whole batch, as the whole run did, and return the block's part."""
        return draw_block(function, args, kwargs, self._block, self._axis)

    def _axis(self, function: OpOverload, shape: tuple[int, ...]) -> int | None:
        kind: DrawKind = (str(function), len(shape))
        self.drawn.append((kind, shape))
        whole_kind, whole = next(self._whole, (None, ()))
        if whole_kind != kind:
            raise NotByRowsError(WholeReason.DRAWS_OTHERWISE)
        axes = [d for d in range(len(shape)) if shape[d] != whole[d]]
        block = self._block
        if len(axes) > 1 or any(shape[d] * block.num_all != whole[d] * block.num_mine for d in axes):
            raise NotByRowsError(WholeReason.DRAWS_UNEVENLY)
        axis = axes[0] if axes else None
        if self._axes.setdefault(kind, axis) != axis:
            raise NotByRowsError(WholeReason.DRAWS_FOR_ROWS_AND_OTHERS)
        if axis is not None and shape[axis] != block.num_mine:
            self.multiples.add(kind)
        return axis


def _storage_key(tensor: Tensor) -> int:
    return storage_of(tensor)._cdata if tensor.layout == torch.strided else 0


# Note [Packed sequences]
#
# A packed sequence has the steps of several sequences as its rows, and beside them a list of sizes: how many sequences
# have a first step, a second, and so on. A part of the rows does not fit the sizes. On a CPU torch refuses it. cuDNN's
# layers take the number of steps from the sizes, and the size of the result from the rows, and nothing compares them:
# they read and write beyond the ends of both, into memory of other tensors. This was probably the cause of the
# DivergenceError of an LSTM that was examined with a part of a packed sequence, on three ranks that shared a GPU. So a
# module that is called with a packed sequence runs whole, on every device, and an examination on an accelerator
# compares rows and sizes. A module that packs its input itself cuts it before; with cuDNN it runs whole too, as torch
# says of cuDNN's layers that they draw numbers.
