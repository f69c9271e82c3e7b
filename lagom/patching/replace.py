"""``replaced``: the only place where lagom sets an attribute of torch."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOTHING = object()
_active: dict[int, tuple[object, str, object]] = {}
"""Owner, name and original of each attribute that is replaced now, in this order; ``_NOTHING`` if it was inherited."""


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Set ``owner.name`` to ``value``, then restore it; an inherited name is inherited again."""
    # From the dict: the staticmethod or property itself, not the result of attribute access.
    before = vars(owner).get(name, _NOTHING)
    entry = owner, name, before
    _active[id(entry)] = entry
    setattr(owner, name, value)
    try:
        yield
    finally:
        del _active[id(entry)]
        _put_back(owner, name, before)


@contextmanager
def originals(package: str) -> Iterator[None]:
    """Put back the public functions of modules of ``package`` that are replaced, for the time of the ``with``.

    Not methods and private functions, such as those of loaders and backwards: other threads may call these meanwhile.
    """
    with ExitStack() as stack:
        for owner, name, before in reversed(list(_active.values())):
            if isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] == package and name[0] != "_":
                stack.callback(setattr, owner, name, vars(owner)[name])
                _put_back(owner, name, before)
        yield


def replaced_at(value: object) -> tuple[object, str] | None:
    """Return where ``value`` has been set in the place of an original: the owner, and the attribute's name."""
    for owner, name, _ in list(_active.values()):
        if vars(owner).get(name) is value:
            return owner, name
    return None


def _put_back(owner: object, name: str, before: object) -> None:
    if before is _NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
