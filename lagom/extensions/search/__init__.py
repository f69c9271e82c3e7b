"""Searches and ablation studies: many trials of one training function, on the slots of a cluster.

Start with ``search.py`` and ``ablate.py``; ``slots/`` is where trials run, ``samplers/`` chooses their values,
``pages/`` is their report, ``on_rank/`` a trial as its ranks see it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lagom.extension import Extension

if TYPE_CHECKING:
    from collections.abc import Callable

    from lagom.config import TorchDistributedConfig
    from lagom.on_rank.rank_call import RankCall
    from lagom.plan import Plan
    from lagom.session.session import Session


class Search(Extension):
    """Searches and ablation studies, whose settings are ``HyperparameterOptConfig`` and ``AblationConfig``."""

    name = "search"
    messages = "lagom.extensions.search.on_rank.messages"

    def is_wanted(self, plan: Plan) -> bool:
        """See ``Extension``."""
        return plan.searches

    def add_commands(self, commands: Any) -> None:
        """See ``Extension``."""
        from lagom.extensions.search.search_command import add_search_command

        add_search_command(commands)

    def runs_config(self, config: TorchDistributedConfig) -> Callable[[Callable[..., Any], Any], Any] | None:
        """See ``Extension``."""
        from lagom.config import AblationConfig, HyperparameterOptConfig

        if isinstance(config, HyperparameterOptConfig):
            from lagom.extensions.search.search import search

            return search
        if isinstance(config, AblationConfig):
            from lagom.extensions.search.ablate import ablate

            return ablate
        return None

    def serves_host(self, plan: Plan) -> Callable[..., None] | None:
        """See ``Extension``."""
        if not plan.searches:
            return None
        from lagom.extensions.search.on_host.trial_host import serve_trials

        return serve_trials

    def process(self, rank_call: RankCall) -> AbstractContextManager[None]:
        """See ``Extension``."""
        from lagom.extensions.search.on_rank.trial_on_rank import wait_for_trial

        wait_for_trial(rank_call)
        return nullcontext()

    def rank(self, session: Session) -> AbstractContextManager[None]:
        """See ``Extension``."""
        from lagom.extensions.search.on_rank.trial_on_rank import trial_on_rank

        return trial_on_rank(session)
