"""``WholeCalls``: count the calls of modules that run whole on every rank, and measure their share of the time."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from lagom.forward.rows.whole_reasons import WholeReason
from lagom.whole_modules import WholeModule

if TYPE_CHECKING:
    from torch import nn

    from lagom.forward.rows.whole_reasons import FilledReason
    from lagom.run_state.module_registry import ModuleRegistry

_MAX_PATHS = 64
"""Number of accounts after which a module is named by its class alone, since a search for its path takes time."""


@dataclass(eq=False, slots=True)
class CallAccount:
    """Calls of one module that ran whole for one reason, or all forwards that ran split; a context for one call."""

    whole_calls: WholeCalls
    name: str
    kind: str
    reason: FilledReason | None
    calls: int = 0
    seconds: float = 0.0
    splits_inside: bool = False
    pays_from: int | None = None
    """As in ``WholeModule``; 0 if no number of rows pays."""

    def __enter__(self) -> None:
        now, all_calls = perf_counter(), self.whole_calls
        if all_calls.running:
            all_calls.running[-1].seconds += now - all_calls.since
            if self.reason is None:
                for outer in all_calls.running:
                    outer.splits_inside = True
        self.calls += 1
        all_calls.running.append(self)
        all_calls.since = now

    def __exit__(self, *_: object) -> None:
        now, all_calls = perf_counter(), self.whole_calls
        self.seconds += now - all_calls.since
        all_calls.running.pop()
        all_calls.since = now


class WholeCalls:
    """Divides the time of forwards among accounts: at each moment it belongs to that of the innermost call.

    So two calls of ``perf_counter`` for each call are enough. Modules that run inside a split or a small forward have
    no accounts.
    """

    def __init__(self, modules: ModuleRegistry) -> None:
        self._modules = modules
        self._accounts: dict[tuple[str, str, WholeReason], CallAccount] = {}
        self.running: list[CallAccount] = []
        """Accounts of the calls that run now, the outermost first."""
        self.since = 0.0
        """Time from which on the time belongs to the last of them."""
        self.split = CallAccount(self, "", "", None)
        """Account of all forwards that run split."""

    def account(self, known: dict[WholeReason, CallAccount], module: nn.Module, reason: FilledReason) -> CallAccount:
        """Return the account of ``module`` for ``reason``; ``known`` has those of this module."""
        found = known.get(reason.reason)
        if found is None:
            kind = type(module).__name__
            name = kind if len(self._accounts) >= _MAX_PATHS else self._modules.path_of(module)
            found = self._accounts.setdefault((name, kind, reason.reason), CallAccount(self, name, kind, reason))
            known[reason.reason] = found
        return found

    def modules(self) -> list[WholeModule]:
        """Return the modules that ran whole, the one with the largest share of the time first."""
        total = self.split.seconds + sum(one.seconds for one in self._accounts.values())
        whole_modules = [
            WholeModule(
                name=one.name,
                kind=one.kind,
                reason=one.reason.reason,
                text=one.reason.text,
                remedy=one.reason.reason.remedy,
                calls=one.calls,
                share=one.seconds / total if total else 0.0,
                splits_inside=one.splits_inside,
                is_small=one.reason.reason is WholeReason.SMALL,
                pays_from=one.pays_from or None,
            )
            for one in self._accounts.values()
            if one.reason is not None
        ]
        return sorted(whole_modules, key=lambda one: -one.share)
