"""``lagom.on_rank.rank_call``: the report of an error fits into a frame, whatever its texts are."""

from __future__ import annotations

import pytest

from lagom.on_rank.rank_call import pack_error
from lagom.program.payload import unpack
from lagom.wire.framing import body_of

CASES = [
    pytest.param(kind, one, id=f"{kind.__name__}-{one!a}", marks=pytest.mark.soak if one == slow else ())
    for kind, slow in ((ValueError, "\udc80"), (SystemExit, None))
    for one in ("x", "\0", "ü", "\N{SNOWMAN}", "\N{GRINNING FACE}", "\udc80")
]


@pytest.mark.parametrize(("kind", "character"), CASES)
def test_a_report_fits_into_a_frame_in_any_characters(kind: type[BaseException], character: str) -> None:
    parcel, report = pack_error(kind("begin" + character * 1_000_000), 0, {})
    assert body_of(report)
    assert report.message.startswith("begin" + character * 1000)
    if kind is ValueError:
        assert report.traceback.rstrip("\n").endswith(character * 1000)
        assert len(str(unpack(bytearray(parcel.tobytes()))["error"])) == 1_000_005
