"""``Settable``: base of all of Maggy's configs, whose fields can be passed by position, and set afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any


class Settable:
    """Lets the fields of a frozen config be set, and checks each as it is set."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in {each.name for each in fields(self)}:  # type: ignore[arg-type]  # beside a config's class
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")
        before = getattr(self, name)
        object.__setattr__(self, name, value)
        try:
            self.__post_init__()  # type: ignore[attr-defined]  # the config's
        except ValueError:
            object.__setattr__(self, name, before)
            raise


def by_position(
    config: str, names: Sequence[str], positional: Sequence[Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of ``config`` that were passed by position, by name.

    Raises:
        TypeError: if there are too many, or one is in ``given`` too.
    """
    if len(positional) > len(names):
        raise TypeError(f"{config} takes {len(names)} by position, not {len(positional)}")
    settings = dict(zip(names, positional, strict=False))
    if twice := [name for name in settings if name in given]:
        raise TypeError(f"{config} got {twice[0]!r} twice")
    return settings
