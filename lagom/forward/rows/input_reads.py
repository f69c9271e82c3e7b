"""``InputReads``: numbers of the whole input that a forward reads. See Note [Reads of the input]."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes as disabled_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from lagom.forward.rows.draws import Answer, InputRead, draws_random_numbers, tensors_in
from lagom.inspection.reads import is_tensor
from lagom.run_state.memory_layout import storage_of
from lagom.run_state.oom_errors import wanted_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch._ops import OpOverload

_MAX_OPERATIONS = 200
"""Number of operations that lead to a read above which the forward runs whole: all are repeated before each call."""
_RULES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "aten::all": all,
    "aten::equal": all,
    "aten::any": any,
    "aten::max": max,
    "aten::min": min,
    "aten::sum": sum,
}
"""How the number of a batch comes from those of its parts, by the operation that makes the number."""
_READ = "aten::_local_scalar_dense"
_MAX_DIMENSIONS = 12
"""Number of dimensions of the input above which products of three sizes are no longer considered."""
_MAX_SHAPES = 256
"""Number of shapes of the input for which the operations are kept ready."""
Shapes: TypeAlias = "tuple[tuple[int, ...] | None, ...]"
"""Shape of each leaf of the arguments; None for one that is no tensor."""


@dataclass(frozen=True, slots=True)
class Given:
    """Stands for a tensor that a forward gets: the argument ``leaf``, or else the buffer ``name`` of a module."""

    leaf: int
    module: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """Stands for the tensor ``place`` among the results of the operation ``number``."""

    number: int
    place: int


@dataclass(frozen=True, slots=True)
class Constant:
    """Stands for a number from outside the forward, as torch makes a tensor of the number in ``mask[:, 0] = False``."""

    number: bool | int | float | complex
    dtype: torch.dtype


class Formula(NamedTuple):
    """A number as the product of ``factor`` and sizes, plus ``offset``."""

    factor: int
    sizes: tuple[tuple[int, int], ...]
    """Leaf and dimension of each size."""
    offset: int

    def value(self, shapes: Shapes) -> int:
        """Return the number for arguments with these ``shapes``."""
        return self.factor * math.prod([(shapes[leaf] or ())[dim] for leaf, dim in self.sizes]) + self.offset


@dataclass(frozen=True, slots=True)
class Size:
    """Stands for a number that may depend on the shapes of the arguments; all ``formulas`` fit all calls so far."""

    formulas: tuple[Formula, ...]

    @staticmethod
    def of(number: int, shapes: Shapes) -> Size:
        """Return all formulas that give ``number`` for arguments with these ``shapes``."""
        dims = [(leaf, dim) for leaf, shape in enumerate(shapes) for dim in range(len(shape or ()))]
        formulas = [Formula(number, (), 0)]
        for length in (1, 2) if len(dims) > _MAX_DIMENSIONS else (1, 2, 3):
            for sizes in itertools.combinations(dims, length):
                product = Formula(1, sizes, 0).value(shapes)
                for offset in (0, 1, -1):
                    factor, rest = divmod(number - offset, product) if product else (0, 1)
                    if factor > 0 and not rest:
                        formulas.append(Formula(factor, sizes, offset))
        return Size(tuple(formulas))

    def fitting(self, number: object, shapes: Shapes) -> Size:
        """Return the formulas that also give ``number`` for arguments with these ``shapes``."""
        return Size(tuple([formula for formula in self.formulas if formula.value(shapes) == number]))


@dataclass(frozen=True, slots=True)
class Operation:
    """One of torch's operations; ``args`` and ``kwargs`` are flattened, with placeholders for tensors and sizes."""

    name: str
    overload: str
    leaves: tuple[Any, ...]
    spec: TreeSpec

    def function(self) -> OpOverload:
        """Return the function that runs the operation."""
        space, _, packet = self.name.partition("::")
        function: OpOverload = getattr(getattr(getattr(torch.ops, space), packet), self.overload or "default")
        return function

    def is_reduction(self) -> bool:
        """Return whether the operation makes one number of all elements of a tensor, by one of the rules."""
        return self.name in _RULES and self.overload in ("", "default")

    def fitting(self, other: Operation, shapes: Shapes) -> Operation | None:
        """Return this operation with the formulas that fit ``other`` too; None if it is another operation.

        Args:
            other: the operation with plain numbers, of a call with arguments of these ``shapes``.
        """
        if (self.name, self.overload, self.spec) != (other.name, other.overload, other.spec):
            return None
        leaves = []
        for own, its in zip(self.leaves, other.leaves, strict=True):
            leaf = own.fitting(its, shapes) if isinstance(own, Size) else own
            if (isinstance(leaf, Size) and not leaf.formulas) or (not isinstance(leaf, Size) and leaf != its):
                return None
            leaves.append(leaf)
        return replace(self, leaves=tuple(leaves))


class InputReads:
    """The operations by which a forward computes the numbers that it reads from its input.

    Args:
        operations: the operations of one call, by their numbers in it.
        reads: numbers of the operations that read.
        values: numbers that the forward has read in this call, by which it may have chosen its way.
        shapes: shapes of the leaves of the arguments of this call.
    """

    def __init__(
        self,
        operations: Sequence[Operation] = (),
        reads: Sequence[int] = (),
        values: Sequence[object] = (),
        shapes: Shapes = (),
    ) -> None:
        self._plain = tuple(operations)
        self._shapes = shapes
        self._operations = [
            replace(operation, leaves=tuple([_size_of(leaf, shapes) for leaf in operation.leaves]))
            for operation in operations
        ]
        self.reads = tuple(reads)
        self.values = tuple(values)
        self._makers = [self._maker(number) for number in self.reads]
        """Number of the operation that makes each number, of rows of the batch."""
        self._ready: dict[Shapes, list[tuple[OpOverload, tuple[Any, ...], TreeSpec]] | None] = {}

    def _maker(self, number: int) -> int:
        """Return the number of the operation that makes what operation ``number`` reads."""
        reader = self._plain[number]
        maker: int = number if reader.name in _RULES else reader.leaves[0].number  # torch.equal makes and reads
        return maker

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made again, and cannot be pickled."""
        return vars(self) | {"_ready": {}}

    def learn(self, other: InputReads) -> bool:
        """Take over what another call shows about sizes; return False if its operations are others."""
        if self.reads != other.reads or len(self._operations) != len(other._plain):
            return False
        operations = [
            known.fitting(new, other._shapes) for known, new in zip(self._operations, other._plain, strict=True)
        ]
        if None in operations:
            return False
        self._operations = [operation for operation in operations if operation is not None]
        self._ready.clear()
        return True

    def knows(self, shapes: Shapes) -> bool:
        """Return whether all numbers in the operations are known for arguments with these ``shapes``."""
        return self._prepared(shapes) is not None

    def find(self, leaves: Sequence[Any], modules: Sequence[nn.Module]) -> tuple[object, ...] | None:
        """Return the numbers that a forward would read from ``leaves``; None if they cannot be found.

        Args:
            leaves: the leaves of the arguments.
            modules: the module and all modules inside it.
        """
        run = self._run(leaves, modules)
        return None if run is None else tuple([run[0][number][0] for number in self.reads])

    def rows(self, leaves: Sequence[Any], modules: Sequence[nn.Module]) -> list[Tensor] | None:
        """Return the tensors whose rows the numbers are made of; None if they cannot be found."""
        run = self._run(leaves, modules)
        return None if run is None else [tensor for number in self._makers for tensor in run[1][number]]

    def combine(self, parts: Iterable[Sequence[Any]], modules: Sequence[nn.Module]) -> tuple[object, ...] | None:
        """Return the numbers of a batch from those of its ``parts``, which are leaves; None if they are not found."""
        numbers = [self.find(part, modules) for part in parts]
        if any(number is None for number in numbers):
            return None
        rules = [_RULES[self._plain[number].name] for number in self._makers]
        columns = zip(*[number for number in numbers if number is not None], strict=True)
        return tuple([rule(column) for rule, column in zip(rules, columns, strict=True)])

    def _run(
        self, leaves: Sequence[Any], modules: Sequence[nn.Module]
    ) -> tuple[list[list[Any]], list[list[Tensor]]] | None:
        """Run the operations; return the results of each and its tensors; None if they cannot be run."""
        prepared = self._prepared(shapes_of(leaves))
        if prepared is None:
            return None
        results: list[list[Any]] = []
        given: list[list[Tensor]] = []

        def tensor_of(place: Any) -> Any:
            if isinstance(place, Result):
                return results[place.number][place.place]
            if isinstance(place, Given):
                return modules[place.module]._buffers[place.name] if place.name else leaves[place.leaf].detach()
            if isinstance(place, Constant):
                return torch.tensor(place.number, dtype=place.dtype, device="cpu")
            return place

        try:
            with torch.no_grad():
                for function, places, spec in prepared:
                    values = [tensor_of(place) for place in places]
                    given.append([value for value in values if isinstance(value, torch.Tensor)])
                    args, kwargs = tree_unflatten(values, spec)
                    results.append(tree_flatten(function(*args, **kwargs))[0])
        except Exception as error:  # the numbers may be another way's, for which the operations are wrong
            if wanted_bytes(error) is not None:  # one rank alone may lack memory, and all must decide alike
                raise
            return None
        return results, given

    def answers(self, reads: Sequence[object], part: Sequence[object] | None = None) -> list[object]:
        """Return ``reads``, which a forward read in its probe, with an ``Answer`` in place of each ``InputRead``.

        Args:
            part: the numbers that the forward should read from its rows; None if they are not known.
        """
        part = part if part is not None else [None] * len(self.values)
        return [
            Answer(read.place, self.values[read.place], part[read.place]) if isinstance(read, InputRead) else read
            for read in reads
        ]

    def _prepared(self, shapes: Shapes) -> list[tuple[OpOverload, tuple[Any, ...], TreeSpec]] | None:
        if shapes not in self._ready:
            if len(self._ready) >= _MAX_SHAPES:
                self._ready.clear()
            prepared = []
            for operation in self._operations:
                values = [_known_value(leaf, shapes) for leaf in operation.leaves]
                if None in values:
                    break
                prepared.append(
                    (operation.function(), tuple([value for (value,) in filter(None, values)]), operation.spec)
                )
            self._ready[shapes] = prepared if len(prepared) == len(self._operations) else None
        return self._ready[shapes]


def shapes_of(leaves: Sequence[Any]) -> Shapes:
    """Return the shape of each of ``leaves`` that is a tensor, None for others."""
    return tuple([tuple(leaf.shape) if is_tensor(leaf) and not leaf.is_nested else None for leaf in leaves])


def _size_of(leaf: Any, shapes: Shapes) -> Any:
    return Size.of(leaf, shapes) if type(leaf) is int else leaf


def _known_value(leaf: Any, shapes: Shapes) -> tuple[Any] | None:
    """Return the value of a placeholder of a size in a tuple, if all its formulas agree on it; others unchanged."""
    if not isinstance(leaf, Size):
        return (leaf,)
    values = {formula.value(shapes) for formula in leaf.formulas}
    return (values.pop(),) if len(values) == 1 else None


class InputReadsRecorder:
    """Records the operations of a forward on tensors that come from its input without gradient, and from no parameter.

    Args:
        leaves: the leaves of the arguments.
        modules: the module and all modules inside it.
    """

    def __init__(self, leaves: Sequence[Any], modules: Sequence[nn.Module]) -> None:
        self._places: dict[tuple[object, ...], Given | Result] = {}
        """Where the content of a piece of memory comes from."""
        self._kept: dict[int, StorageWeakRef] = {}
        """Keeps addresses from being reused, without keeping the elements."""
        self._made: dict[int, StorageWeakRef] = {}
        """Memory that operations which are not recorded have returned."""
        self._operations: list[tuple[Operation, set[int], set[int]]] = []
        """Operations with the memory that they use, and the memory that they write or return."""
        self._shapes = shapes_of(leaves)
        self._reads: list[int] = []
        self._values: list[object] = []
        for index, module in enumerate(modules):
            for name, buffer in module._buffers.items():
                self._add(buffer, Given(-1, index, name))
        for index, leaf in enumerate(leaves):
            self._add(leaf, Given(index))
        self._given = frozenset(self._kept)

    def record(
        self,
        function: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        """Record an operation after it has run.

        Args:
            tensors: those among its arguments.
            written: those of them that it has changed.
        """
        changed = tensors_in((result,))
        is_given = any(
            storage_of(tensor)._cdata in self._given for tensor in written
        )  # to repeat it would change it again
        may_repeat = not is_given and not draws_random_numbers(function, args, kwargs)
        if not may_repeat or not self.knows(tensors) or function._overloadpacket in flop_registry:
            self._forget([*written, *changed])
            return
        number = len(self._operations)
        self._append(function, args, kwargs, tensors, [*written, *changed])
        for index, tensor in enumerate(changed):
            if not any(tensor is other for other in written):
                self._add(tensor, Result(number, index))

    def read(self, function: OpOverload, args: tuple[Any, ...], result: Any) -> InputRead | None:
        """Record an operation that reads; return None if its number cannot be found from the input alone."""
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        if type(result) not in (bool, int) or not self.knows(tensors):
            return None  # a float is another number with each batch
        maker = self._place_of(tensors[0])
        is_made = isinstance(maker, Result) and self._operations[maker.number][0].is_reduction()
        if function._schema.name != "aten::equal" and not (function._schema.name == _READ and is_made):
            return None
        self._reads.append(len(self._operations))
        self._values.append(result)
        self._append(function, args, {}, tensors, [])
        return InputRead(len(self._reads) - 1)

    def finish(self) -> InputReads | None:
        """Return the reads with the operations that lead to them; None if these are too many."""
        wanted: set[int] = set()
        kept: list[int] = []
        for number in reversed(range(len(self._operations))):
            _, used, changed = self._operations[number]
            if number in self._reads or changed & wanted:
                wanted |= used
                kept.insert(0, number)
        if len(kept) > _MAX_OPERATIONS:
            return None
        order = {number: index for index, number in enumerate(kept)}

        def renumbered(leaf: Any) -> Any:
            return Result(order[leaf.number], leaf.place) if isinstance(leaf, Result) else leaf

        operations = [self._operations[number][0] for number in kept]
        operations = [replace(operation, leaves=tuple(map(renumbered, operation.leaves))) for operation in operations]
        return InputReads(operations, [order[number] for number in self._reads], self._values, self._shapes)

    def _append(
        self,
        function: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        changed: Sequence[Tensor],
    ) -> None:
        leaves, spec = tree_flatten((args, kwargs))
        places = [self._place_of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        operation = Operation(function._schema.name, function._schema.overload_name, tuple(places), spec)
        used, made = ({storage_of(tensor)._cdata for tensor in some} for some in (tensors, changed))
        self._operations.append((operation, used, made))

    def knows(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all ``tensors`` come from inputs without gradient alone."""
        return all(self._place_of(tensor) is not None for tensor in tensors)

    def _place_of(self, tensor: Tensor) -> Given | Result | Constant | None:
        if tensor.layout != torch.strided or tensor.is_nested:  # a nested tensor has no sizes
            return None
        memory = storage_of(tensor)._cdata
        if memory in self._kept:
            return self._places.get(_place_key(tensor))
        is_outer = memory not in self._made
        if is_outer and tensor.dim() == 0 and tensor.is_cpu and not tensor.requires_grad:
            with disabled_modes():
                return Constant(tensor.item(), tensor.dtype)
        return None

    def _add(self, tensor: Any, place: Given | Result) -> None:
        is_dense = is_tensor(tensor) and tensor.layout == torch.strided and not tensor.is_nested
        if is_dense and not tensor.requires_grad:
            storage = storage_of(tensor)
            self._kept.setdefault(storage._cdata, StorageWeakRef(storage))
            self._places[_place_key(tensor)] = place

    def _forget(self, tensors: list[Tensor]) -> None:
        """Forget what is known of the memory of ``tensors``."""
        gone = set()
        for tensor in tensors:
            if tensor.layout == torch.strided:
                storage = storage_of(tensor)
                self._made[storage._cdata] = StorageWeakRef(storage)
                gone.add(storage._cdata)
        if not gone.isdisjoint(self._kept):
            self._places = {key: place for key, place in self._places.items() if key[0] not in gone}


def _place_key(tensor: Tensor) -> tuple[object, ...]:
    return (
        *(storage_of(tensor)._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype),
        *(tensor.is_conj(), tensor.is_neg()),
    )


# Note [Reads of the input]
#
# A forward may read a number of its input: whether a mask is all ones, whether an id is the padding. By this number it
# chooses its way, and a part of the batch may have another. If the number comes from inputs without gradient, and not
# from parameters, every rank can find it, since it has the whole batch. So a probe records the operations that lead to
# each read. The last of them must make one number of rows, so that the number of the batch follows from those of its
# parts (all, any, max, min, sum); the probe compares these rows between the batch and its parts. Before a sliced call,
# every rank runs the operations on all parts. If the numbers of the batch are those of the probe, the forward runs on
# its rows, and its reads get them. Other numbers may be another way, and have a finding of their own.
#
# Among the arguments of the operations are numbers that come from shapes (``expand(len(ids), 1, 9, 9)``). A number is
# kept as all formulas of sizes that give it in each recorded call: those of the probe, which have the rows of the batch
# and of its parts. Where the formulas disagree about new shapes, the call runs whole, is recorded, and decides.
#
# The operations may be out of date: a program may compare ids with a global that it changes. So each rank compares what
# its forward reads with what the operations gave for its part. If all are equal, the number of the batch is right too,
# since it follows from them. If one was not, the gather of the outputs fails on all ranks, the call is repeated whole,
# and the next one is probed.
