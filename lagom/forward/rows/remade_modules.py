"""``RemadeModules``: facts about calls that hold for a module which a program makes anew around the same modules."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.utils.weak import WeakIdKeyDictionary

from lagom.forward.rows.module_tree import EVERYONES
from lagom.forward.rows.split_candidate import KnownCalls
from lagom.patching.object_reference import ObjectReference

if TYPE_CHECKING:
    from torch import nn


class RemadeModules:
    """Gives a module without a state of its own the facts about an earlier one of its class around the same modules.

    Some programs wrap a network anew in each step (torchdiffeq does). Each wrapper was examined, and none was ever
    split, since its second call never came. Such a wrapper is as good as the earlier one: it has no attributes,
    parameters or hooks of its own, and the modules inside are the same objects. Modules that only look alike, such as
    copies, share nothing: what decides whether they mix rows may be anywhere among their values.
    """

    def __init__(self) -> None:
        self._earlier: WeakIdKeyDictionary = WeakIdKeyDictionary(ref_type=ObjectReference)
        """For a first child: by class and names, the other children and the facts."""

    def known_calls(self, module: nn.Module) -> KnownCalls:
        """Return the facts about ``module`` with which its first call begins."""
        state = vars(module)
        children = list((state.get("_modules") or {}).items())
        if not children or any(child is None for _, child in children) or not _is_stateless(module):
            return KnownCalls()
        first, others = children[0][1], [child for _, child in children[1:]]
        key = type(module), module.training, tuple(name for name, _ in children)
        known = self._earlier.setdefault(first, {})
        refs, earlier = known.get(key, ([], None))
        is_same = earlier is not None and all(ref() is child for ref, child in zip(refs, others, strict=True))
        calls: KnownCalls = earlier if is_same else KnownCalls()
        known[key] = [weakref.ref(child) for child in others], calls
        return calls


def _is_stateless(module: nn.Module) -> bool:
    """Return whether the module has nothing of its own but the modules in it."""
    state = vars(module)
    if any("__slots__" in vars(base) for base in type(module).__mro__[:-1]) or not state.keys() <= EVERYONES:
        return False
    return not any(value for name, value in state.items() if name not in ("_modules", "training"))
