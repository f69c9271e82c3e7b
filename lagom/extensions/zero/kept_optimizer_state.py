"""``KeptOptimizerState``: optimizer state in the files of a snapshot, until this rank's part is needed."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lagom.extensions.zero.optimizer_probe import OptimizerFinding, ShardingKind
from lagom.extensions.zero.partition import ParameterPiece, partition_by_element, partition_by_parameter
from lagom.optimizers.state_placeholder import StatePlaceholder
from lagom.run_state.memory_layout import flatten_like, flatten_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lagom.run_state.state_shards import KeptParts

Ranges = dict[Any, list[tuple[int, int, torch.Tensor]]]


class StateOfOptimizer(NamedTuple):
    """An optimizer's sharded state without the values that are in shards."""

    key: Any
    """Key of the optimizer, equal on all ranks."""
    kind: str
    """Value of the ``ShardingKind``."""
    changes_gradients: bool
    parameters: list[torch.Tensor]
    """The sharded parameters."""
    every: list[torch.Tensor]
    """All parameters of the optimizer, in the order in which they got state."""
    rest: list[tuple[Any, Any]]
    """Keys and values of the state that is equal on all ranks, such as that of parameters that are not sharded."""
    is_default: bool
    """Whether the state is a ``defaultdict`` of dicts."""

    @property
    def finding(self) -> OptimizerFinding:
        """How the optimizer can be stepped in parts."""
        return OptimizerFinding(ShardingKind(self.kind), self.changes_gradients)

    def new_state(self) -> Any:
        """Return an empty state."""
        return defaultdict(dict) if self.is_default else {}


class KeptOptimizerState(StatePlaceholder):
    """Stands in for the state of an optimizer in a run that continues from a snapshot, until the optimizer's next step.

    A rank reads its own part for the step. If the program reads the state before, this object is replaced by the whole
    state. Outside of the run, where nothing replaces it, it behaves like the whole state.
    """

    def __init__(self, held: StateOfOptimizer, key: Any, parts: KeptParts) -> None:
        self.held = held
        self.key = key
        """Key for this rank's part in snapshots before the optimizer's next step."""
        self._parts = parts
        self._index = {id(p): i for i, p in enumerate(held.parameters)}
        self._whole: Any = None

    def num_bytes(self) -> int:
        """See ``StatePlaceholder``."""
        return 0

    def is_of(self, parameters: Sequence[int]) -> bool:
        """Return whether the optimizer had the parameters with these ids, and no others, at the snapshot."""
        return {id(p) for p in self.held.every} == set(parameters)

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether there is state for ``parameter``."""
        if (number := self._index.get(id(parameter))) is not None:
            return self._parts.value(_entry(self.held.key, number)) is not None
        return any(key is parameter for key, _ in self.held.rest)

    def read(self, piece: ParameterPiece, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of ``piece`` of a sharded parameter, whatever ``piece.param`` is; {} if there is none."""
        entry = _entry(self.held.key, self._index[id(parameter)])
        entries = {}
        for name, (told, dtype, on_device) in (self._parts.value(entry) or {}).items():
            device = parameter.device if on_device else torch.device("cpu")
            if dtype is None:
                value = told.to(device, copy=True) if isinstance(told, torch.Tensor) else copy.deepcopy(told)
            else:
                size = dtype.itemsize
                line = self._parts.read((*entry, name), piece.start * size, piece.end * size).view(dtype).to(device)
                value = line
                if piece.end - piece.start == parameter.numel():
                    value = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
                    flatten_memory(value).copy_(line)
            entries[name] = value
        return entries

    def whole(self) -> Any:
        """Return the whole state, in the order in which the parameters got it."""
        if self._whole is None:
            whole_state, rest = self.held.new_state(), {id(key): (key, value) for key, value in self.held.rest}
            for parameter in self.held.every:
                if id(parameter) in self._index:
                    if state := self.read(ParameterPiece(0, 0, parameter.numel()), parameter):
                        whole_state[parameter] = state
                elif id(parameter) in rest:
                    whole_state[parameter] = rest.pop(id(parameter))[1]
            whole_state.update(rest.values())
            self._whole = whole_state
        return self._whole

    def collect(self, values: dict[Any, Any], ranges: Ranges, rank: int, world_size: int) -> None:
        """Add to ``values`` and ``ranges`` what ``rank`` writes of this state for another snapshot."""
        parameters = self.held.parameters
        is_cut = ShardingKind(self.held.kind) is ShardingKind.ELEMENTWISE
        partition = partition_by_element if is_cut else partition_by_parameter
        for piece in partition([p.numel() for p in parameters], world_size)[rank]:
            parameter = parameters[piece.param]
            collect_piece(self.key, piece, parameter, self.read(piece, parameter), values, ranges)

    def __getitem__(self, key: Any) -> Any:
        return self.whole()[key]

    def __len__(self) -> int:
        return len(self.whole())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.whole())

    def __contains__(self, key: object) -> bool:
        return key in self.whole()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def __reduce_ex__(self, _: Any) -> Any:
        return _same, (self.whole(),)


def _same(state: Any) -> Any:
    return state


def _entry(key: Any, number: int) -> tuple[Any, ...]:
    return "state", key, number


def collect_piece(
    key: Any,
    piece: ParameterPiece,
    parameter: torch.Tensor,
    state: Mapping[str, Any],
    values: dict[Any, Any],
    ranges: Ranges,
) -> None:
    """Add the state of one piece of a parameter of the optimizer ``key`` to ``values`` and ``ranges``.

    Each value becomes a triple: the value, the type of its elements, and whether it is on the parameter's device.
    Tensors with one element for each element of the piece have None in place of the value, and are in ``ranges``;
    other values have None in place of a type.
    """
    if not state:
        return
    entry = _entry(key, piece.param)
    told = values.setdefault(entry, {})
    for name, value in state.items():
        line = flatten_value(value, piece, parameter) if isinstance(value, torch.Tensor) else None
        if line is None:
            on_device = isinstance(value, torch.Tensor) and value.device.type != "cpu"
            told[name] = (value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value), None, on_device
            continue
        told[name] = None, value.dtype, value.device.type != "cpu"
        size = value.dtype.itemsize
        ranges[(*entry, name)] = [(piece.start * size, piece.end * size, as_bytes(line))]


def flatten_value(value: torch.Tensor, piece: ParameterPiece, parameter: torch.Tensor) -> torch.Tensor | None:
    """Return ``value`` flat, in the order of memory, if it has one element per element of the piece; else None."""
    if value.layout != torch.strided:
        return None
    if piece.end - piece.start < parameter.numel():
        return value if value.shape == (piece.end - piece.start,) else None
    is_like = value.dim() > 0 and value.shape == parameter.shape
    return flatten_like(value, parameter) if is_like else None


def as_bytes(line: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a flat tensor."""
    plain = line.detach().resolve_conj().resolve_neg().contiguous()
    return (torch.view_as_real(plain).view(-1) if plain.is_complex() else plain).view(torch.uint8)
