"""``cut_state`` and ``gather_states``: cut an optimizer's state into a rank's pieces, and gather it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lagom.errors import DivergenceError, LagomError
from lagom.exchange.plain_values import all_gather_values
from lagom.extensions.zero.kept_optimizer_state import flatten_value
from lagom.run_state.memory_layout import flatten_like, flatten_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lagom.exchange.group import Group
    from lagom.extensions.zero.partition import ParameterPiece

_INLINE = 1 << 14
"""A tensor of at most this many bytes travels inside its description; a larger one is broadcast afterwards."""


class HeldState(NamedTuple):
    """The description of one entry of a piece's state, which the rank that has the piece sends to all others."""

    value: Any
    """The value; None if a tensor follows."""
    dtype: torch.dtype | None
    """Type of the tensor; None if the value is not a tensor."""
    shape: tuple[int, ...]
    cut: bool
    """Whether the tensor has one element for each element of the piece, in the order of memory."""
    on_device: bool
    """Whether the tensor is not on the CPU; step counts, for example, may be there while the parameter is on a GPU."""


def cut_state(state: Mapping[str, Any], parameter: torch.Tensor, piece: ParameterPiece) -> dict[str, Any]:
    """Return the part of an optimizer's state for ``parameter`` that belongs to ``piece``."""
    return {
        key: flatten_like(value, parameter)[piece.start : piece.end].clone() if _is_like(value, parameter) else value
        for key, value in state.items()
    }


def _is_like(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def gather_states(
    group: Group,
    parameters: Sequence[torch.Tensor],
    pieces: Sequence[Sequence[ParameterPiece]],
    mine: Mapping[ParameterPiece, Mapping[str, Any]] | None,
    *,
    keep: bool,
) -> list[dict[str, Any] | None]:
    """Return the whole state of each of ``parameters``, None for one without state; a collective.

    Args:
        pieces: the pieces of each rank.
        mine: the state of this rank's pieces; None if this rank cannot give its part.
        keep: whether this rank wants the result; otherwise it only takes part, and each state returned is None.

    Raises:
        DivergenceError: on all ranks, when a rank cannot give its part.
        LagomError: when the state has objects that are neither plain values nor tensors.
    """
    rows = _describe_all(group, parameters, pieces, mine)
    assert mine is not None
    states: list[dict[str, Any] | None] = [None] * len(parameters)
    for owner, piece in _in_order(pieces):
        own = mine.get(piece, {}) if owner == group.rank else {}
        for key, fields in rows[owner][piece].items():
            held = HeldState(*fields)
            value = _read_value(group, held, own.get(key), owner, (piece, parameters[piece.param]))
            if keep:
                entries = states[piece.param]
                if entries is None:
                    entries = states[piece.param] = {}
                _write_value(entries, key, held, value, piece, parameters[piece.param])
    return states


def outline_states(
    group: Group,
    parameters: Sequence[torch.Tensor],
    pieces: Sequence[Sequence[ParameterPiece]],
    mine: Mapping[ParameterPiece, Mapping[str, Any]],
) -> list[dict[str, HeldState] | None]:
    """Return the descriptions of each parameter's state, None for one without state; a collective.

    Args:
        pieces: the pieces of each rank.
        mine: the state of this rank's pieces.

    Raises:
        DivergenceError, LagomError: as ``gather_states``.
    """
    rows = _describe_all(group, parameters, pieces, mine)
    outlines: list[dict[str, HeldState] | None] = [None] * len(parameters)
    for owner, piece in _in_order(pieces):
        for key, fields in rows[owner][piece].items():
            entries = outlines[piece.param]
            if entries is None:
                entries = outlines[piece.param] = {}
            entries.setdefault(key, HeldState(*fields))
    return outlines


def _describe_all(
    group: Group,
    parameters: Sequence[torch.Tensor],
    pieces: Sequence[Sequence[ParameterPiece]],
    mine: Mapping[ParameterPiece, Mapping[str, Any]] | None,
) -> list[dict[ParameterPiece, dict[str, Any]]]:
    """Return each rank's descriptions of the state of its pieces."""
    told = None if mine is None else {p: _describe_state(mine.get(p, {}), p, parameters) for p in pieces[group.rank]}
    try:
        rows = all_gather_values(group, told)
    except TypeError as error:
        raise LagomError(
            f"the state of an optimizer, which is shared out over the ranks, cannot be put together: {error}; keep "
            "numbers and tensors in it, or use zero_lvl=0"
        ) from error
    if (missing := [rank for rank, row in enumerate(rows) if row is None]) or mine is None:
        raise DivergenceError(
            f"the state of an optimizer was asked for that rank {missing[0]} does not have, or is in the middle of "
            "stepping; create the same optimizers and step them in the same order on every rank"
        )
    return rows


def _in_order(pieces: Sequence[Sequence[ParameterPiece]]) -> Iterator[tuple[int, ParameterPiece]]:
    every = [(piece, owner) for owner, part in enumerate(pieces) for piece in part]
    return ((owner, piece) for piece, owner in sorted(every))


def _describe_state(
    state: Mapping[str, Any], piece: ParameterPiece, parameters: Sequence[torch.Tensor]
) -> dict[str, HeldState]:
    told = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            told[key] = HeldState(value, None, (), False, False)
            continue
        line = flatten_value(value, piece, parameters[piece.param])
        sent = value if line is None else line
        follows = sent.layout == torch.strided and sent.nbytes > _INLINE
        inline = None if follows else sent.detach().cpu().clone()
        told[key] = HeldState(inline, value.dtype, tuple(sent.shape), line is not None, value.device.type != "cpu")
    return told


def _read_value(
    group: Group, held: HeldState, mine: Any, owner: int, place: tuple[ParameterPiece, torch.Tensor]
) -> Any:
    piece, parameter = place
    if held.dtype is None:
        return held.value
    device = parameter.device if held.on_device else torch.device("cpu")
    if held.value is not None:
        return held.value.to(device)
    # The rank that has the piece returns a copy, since the program may change the gathered state.
    if owner == group.rank:
        line = flatten_value(mine, piece, parameter)
        value = (mine if line is None else line).detach().clone(memory_format=torch.contiguous_format)
    else:
        value = torch.empty(held.shape, dtype=held.dtype, device=device)
    group.broadcast(value.view(-1).view(torch.uint8), owner)  # as bytes: not every type can be sent
    return value


def _write_value(
    entries: dict[str, Any], key: str, held: HeldState, value: Any, piece: ParameterPiece, parameter: torch.Tensor
) -> None:
    if not held.cut:
        entries.setdefault(key, value)
        return
    if key not in entries:
        entries[key] = torch.empty_like(parameter, dtype=held.dtype, device=value.device, requires_grad=False)
    flatten_memory(entries[key])[piece.start : piece.end] = value
