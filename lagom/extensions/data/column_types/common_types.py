"""``common_type``: finds the one Arrow type of a column that has several types in the files of a table.

Arrow has several types for the same values, such as string, large_string and string_view. Which of them a file has
depends on the program that wrote it, so they count as one type here, and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lagom.extensions.data.column_types import types

if TYPE_CHECKING:
    from collections.abc import Iterable

_DIGITS = {8: 10, 16: 10, 32: 10, 64: 20}
"""Digits before the point that a decimal needs for integers of so many bits, by the rules of Delta."""


def common_type(kinds: Iterable[Any]) -> Any:
    """Return the type to which a column of the types ``kinds`` is read without loss; None if there is none.

    A view, and a dictionary beside other types, are replaced by the type of their values.
    """
    all_kinds = list(dict.fromkeys(kinds))
    distinct: dict[Any, Any] = {}
    for kind in sorted(all_kinds, key=has_view):
        plain = kind if len(all_kinds) == 1 else types.plain(kind)
        distinct.setdefault(logical(kind), logical(kind) if has_view(kind) else plain)
    for wide, found in distinct.items():
        if all(_widens(narrow, wide) for narrow in distinct):
            return found
    return None


def fits(kind: Any, declared: Any) -> bool:
    """Return whether values of ``kind`` can be read as ``declared``, the type that the log of a Delta table gives."""
    return _widens(logical(kind), logical(declared), is_declared=True)


def is_read_as(kind: Any, wanted: Any) -> bool:
    """Return whether lagom reads arrays of ``kind`` like arrays of ``wanted``, without a cast."""
    return bool(kind == wanted or (not has_view(kind) and logical(kind) == logical(wanted)))


def cast(array: Any, wanted: Any) -> Any:
    """Return ``array`` with the type ``wanted``, to which ``common_type`` or ``fits`` says it can be converted."""
    import pyarrow as pa

    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(wanted)


def logical(kind: Any) -> Any:
    """Return the type that stands for all of Arrow's types of the same values as ``kind``."""
    import pyarrow as pa
    import pyarrow.types as t

    kind = types.plain(kind)
    if types.is_string(kind):
        return pa.large_string()
    if types.is_text(kind) and not t.is_fixed_size_binary(kind):
        return pa.large_binary()
    if t.is_fixed_size_list(kind):
        return pa.list_(pa.field("item", logical(kind.value_type)), kind.list_size)
    if types.is_ragged(kind) or _is_list_view(kind):
        return pa.large_list(pa.field("item", logical(kind.value_type)))
    if t.is_struct(kind):
        return pa.struct([pa.field(inner.name, logical(inner.type)) for inner in kind])
    return kind


def has_view(kind: Any) -> bool:
    """Return whether ``kind`` is, or contains, one of Arrow's view types, for which most of its functions fail."""
    import pyarrow.types as t

    kind = types.plain(kind)
    if t.is_string_view(kind) or t.is_binary_view(kind) or _is_list_view(kind):
        return True
    if types.is_list(kind):
        return has_view(kind.value_type)
    return bool(t.is_struct(kind)) and any(has_view(inner.type) for inner in kind)


def _is_list_view(kind: Any) -> bool:
    import pyarrow.types as t

    return bool(t.is_list_view(kind) or t.is_large_list_view(kind))


def _widens(narrow: Any, wide: Any, *, is_declared: bool = False) -> bool:
    """Return whether ``wide`` holds all values of ``narrow``, by the rules by which Delta and Spark widen types."""
    import pyarrow.types as t

    if narrow == wide:
        return True
    if t.is_signed_integer(narrow):
        if t.is_decimal(wide):
            return bool(wide.precision - wide.scale >= _DIGITS[narrow.bit_width])
        is_wider = t.is_signed_integer(wide) and narrow.bit_width <= wide.bit_width
        return bool(is_wider or (t.is_float64(wide) and narrow.bit_width <= 32))
    if t.is_floating(narrow):
        return bool(t.is_floating(wide) and narrow.bit_width <= wide.bit_width)
    if t.is_decimal(narrow) and t.is_decimal(wide):
        digits = (narrow.precision - narrow.scale, wide.precision - wide.scale)
        return bool(narrow.scale <= wide.scale and digits[0] <= digits[1])
    if t.is_timestamp(wide):
        # Spark's timestamps in INT96 are in UTC, which the file does not say.
        is_utc = is_declared and t.is_timestamp(narrow) and (narrow.unit, narrow.tz) == (wide.unit, None)
        return bool(is_utc or (t.is_date32(narrow) and wide.tz is None))
    if t.is_large_list(narrow) and t.is_large_list(wide):
        return _widens(narrow.value_type, wide.value_type, is_declared=is_declared)
    if t.is_struct(narrow) and t.is_struct(wide) and [inner.name for inner in narrow] == [inner.name for inner in wide]:
        pairs = zip(narrow, wide, strict=True)
        return all(_widens(one.type, other.type, is_declared=is_declared) for one, other in pairs)
    return False
