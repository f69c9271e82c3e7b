"""``ParameterPublisher``: sends each rank's changes of the parameters to the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lagom.exchange.agreement_exchange import memory
from lagom.run_state.memory_layout import flatten_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lagom.exchange.agreement_exchange import AgreedExchange
    from lagom.exchange.group import Group
    from lagom.extensions.zero.partition import ParameterPiece

_ALONE = 1 << 18
"""Bytes from which a piece is sent from, and received in, the parameter's own memory."""


class _PackedPieces(NamedTuple):
    """Small pieces of one owner and type, which travel together."""

    owner: int
    together: torch.Tensor
    parts: list[torch.Tensor]
    """Views of ``together``."""
    places: list[torch.Tensor]
    """The pieces in the parameters' memory: copied to ``parts`` before a send, and from ``parts`` after a receive."""


class ParameterPublisher:
    """Sends each rank's pieces of some parameters to all others, in place.

    Args:
        frame: carries small pieces in one message.
        pieces: the pieces of each rank.
    """

    def __init__(
        self,
        group: Group,
        frame: AgreedExchange,
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[Sequence[ParameterPiece]],
    ) -> None:
        self._group = group
        self._frame = frame
        self._parameters = list(parameters)
        # Writes through ``data`` do not raise a tensor's version: the caller raises those of changed parameters.
        self._lines = [flatten_memory(p.data) for p in parameters]
        self._alone: list[tuple[int, torch.Tensor]] = []
        small: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
        for owner, part in enumerate(pieces):
            for piece in part:
                place = self._lines[piece.param][piece.start : piece.end]
                if place.is_complex():
                    place = torch.view_as_real(place).view(-1)
                if place.nbytes >= _ALONE:
                    self._alone.append((owner, place))
                else:
                    small.setdefault((owner, place.device, place.dtype), []).append(place)
        self._small = [(owner, places) for (owner, _, _), places in small.items()]
        self._framed: list[_PackedPieces] = []
        self._rows = self._rows_of_frame()

    @property
    def is_current(self) -> bool:
        """Whether the parameters still have the same memory."""
        return all(
            p.data_ptr() == line.data_ptr() and p.dtype == line.dtype and p.numel() == len(line)
            for p, line in zip(self._parameters, self._lines, strict=True)
        )

    @torch.no_grad()
    def publish(self, signed: bytes) -> bool:
        """Send and receive pieces if all ranks gave the same ``signed``; otherwise change nothing and return False.

        The versions of the parameters, by which autograd notices changes, stay as they are.
        """
        rank = self._group.rank
        # Packed pieces that fit into the frame are kept between calls; larger ones are packed anew for each call.
        all_packed = self._framed if self._rows is not None else [_pack_pieces(*one) for one in self._small]
        for packed in all_packed:
            if packed.owner == rank:
                torch._foreach_copy_(packed.parts, packed.places)
        rows = self._frame.gather(None if self._rows is None else self._rows[rank][1], signed)
        if rows is None:
            return False
        if self._rows is not None:  # copy now: the rows are views, valid only until the next exchange
            for (_, own), row in zip(self._rows, rows, strict=True):
                if row is not None and own is not None:
                    own[:] = row  # into the memory of ``_framed``
        moving = [self._group.broadcast_later(place.view(torch.uint8), owner) for owner, place in self._alone]
        if self._rows is None:
            moving += [self._group.broadcast_later(one.together.view(torch.uint8), one.owner) for one in all_packed]
        for work in moving:
            self._group.wait(work)
        for packed in all_packed:
            if packed.owner != rank:
                torch._foreach_copy_(packed.places, packed.parts)
        return True

    def _rows_of_frame(self) -> list[tuple[torch.Tensor, memoryview | None]] | None:
        """Return each rank's packed pieces as a tensor and its memory; None if not on the CPU, or too large for it."""
        rows = []
        for rank in range(self._group.world_size):
            own = [places for owner, places in self._small if owner == rank]
            sizes = [-(-sum(place.nbytes for place in places) // 8) * 8 for places in own]
            if sum(sizes) > self._frame.room or any(not places[0].is_cpu for places in own):
                return None
            whole = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
            for places, raw in zip(own, whole.split(sizes), strict=True):
                num_bytes = sum(place.nbytes for place in places)
                self._framed.append(_pack_pieces(rank, places, raw[:num_bytes].view(places[0].dtype)))
            rows.append((whole, memory(whole) if len(whole) else None))
        return rows


def _pack_pieces(owner: int, places: list[torch.Tensor], together: torch.Tensor | None = None) -> _PackedPieces:
    sizes = [len(place) for place in places]
    if together is None:
        together = torch.empty(sum(sizes), dtype=places[0].dtype, device=places[0].device)
    return _PackedPieces(owner, together, list(together.split(sizes)), places)
