"""Searches and ablation studies: many trials of one training function, on the slots of a cluster.

Start with ``search.py`` and ``ablate.py``; ``slots/`` is where trials run, ``samplers/`` chooses their values,
``pages/`` is their report, ``on_rank/`` a trial as its ranks see it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lagom.extension import Extension

if TYPE_CHECKING:
    from lagom.plan import Plan


class Search(Extension):
    """Searches and ablation studies, whose settings are ``HyperparameterOptConfig`` and ``AblationConfig``."""

    name = "search"

    def is_wanted(self, plan: Plan) -> bool:
        """See ``Extension``."""
        return plan.searches

    def add_commands(self, commands: Any) -> None:
        """See ``Extension``."""
        from lagom.extensions.search.search_command import add_search_command

        add_search_command(commands)
