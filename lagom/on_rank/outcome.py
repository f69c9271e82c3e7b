"""Packs the outcome of a rank: its value or exception as a parcel, and a report for the driver as plain values."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping
from typing import Any

from lagom.errors import CollectiveError, PayloadError
from lagom.program.payload import InParts, Parcel, unpack
from lagom.wire.framing import shorten
from lagom.wire.messages import RankReport


def pack_result(returned: Mapping[str, Any], rank: int, own_classes: Mapping[type, str]) -> tuple[Parcel, RankReport]:
    """Pack ``returned`` of ``rank``, or the error if it cannot be pickled.

    Args:
        own_classes: classes that came from the driver, with the driver's ids, by which they are pickled.
    """
    try:
        return Parcel(returned, own_classes), RankReport(rank=rank, ok=True)
    except PayloadError as error:
        raised = PayloadError(f"rank {rank} returned a {type(returned['value']).__name__}, but {error}")
        raised.__cause__ = error.__cause__
        return pack_error(raised, rank, own_classes)


def pack_error(error: BaseException, rank: int, own_classes: Mapping[type, str]) -> tuple[Parcel, RankReport]:
    """Pack ``error``, which ended the function on ``rank``.

    The report alone describes a SystemExit, or an error that cannot be pickled or unpickled.
    """
    from lagom.program.own_frames import cut_own_frames  # imported for an error only

    cut_own_frames(error)
    text = shorten("".join(traceback.format_exception(error)), keep_end=True)
    report = RankReport(
        rank=rank,
        ok=False,
        consequence=isinstance(error, CollectiveError),
        error=type(error).__name__,
        message=_message(error),
        traceback=text,
    )
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int | None) else shorten(str(error.code))
        return Parcel({"error": None}), dataclasses.replace(report, exited=True, exit=code)
    error.__traceback__ = None
    for travelling in (error, InParts(error)):
        try:
            parcel = Parcel({"error": travelling}, own_classes)
            unpack(bytearray(parcel.tobytes()))
        except Exception:  # a class of the program may raise any error when it is pickled or unpickled
            continue
        return parcel, report
    return Parcel({"error": None}), report


def _message(error: BaseException) -> str:
    try:
        return shorten(str(error))
    except Exception as failure:  # ``__str__`` of a program's own class may raise any error
        return f"(its message fails with {type(failure).__name__})"
