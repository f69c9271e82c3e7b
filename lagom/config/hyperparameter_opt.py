"""``HyperparameterOptConfig``: many trials of one training function, each with other hyperparameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lagom.config.searchspace import Searchspace
from lagom.config.trials import TrialsConfig, check_count
from lagom.settings import explain_fields, nearest

Optimizer = Literal["random", "grid", "tpe", "gp", "asha", "hyperband"]
EarlyStopping = Literal["median", "asha", "none"]

_MAGGYS_NAMES = {"randomsearch": "random", "gridsearch": "grid"}


@explain_fields
@dataclass(frozen=True, kw_only=True, eq=False)
class HyperparameterOptConfig(TrialsConfig):
    """Settings of a search for the best hyperparameters of a training function, by several trials at a time.

    The fields of ``TorchDistributedConfig`` apply to each trial, except ``timeout_s``, ``name``, ``description`` and
    ``run_dir``, which apply to the search. ``world_size``, ``verify``, ``timeline``, ``debug`` and
    ``snapshot_every_s`` must keep their default values.

    Raises:
        ValueError: when a field has a value it cannot have; nothing has been started then.
    """

    searchspace: Searchspace | Mapping[str, Any] | Callable[[Any], Any] | None = None
    """Values to search: a ``Searchspace``; a dict of Optuna's distributions; or a function that is given a trial of
    Optuna's and calls its ``suggest_...`` methods, for parameters that depend on others. If the function returns a
    dict, that dict is added to ``hparams``, else the suggested values are."""
    num_trials: int | None = None
    """Number of trials, including those of the search that ``resume`` names. None: as many as fit into ``timeout_s``,
    or as the grid has."""
    optimizer: Optimizer | Any = "tpe"
    """Chooses the values of a trial: "random", "grid", "tpe", "gp", "asha" (random, and stops trials by successive
    halving), "hyperband" (tpe, and stops trials by Hyperband), or a sampler of Optuna's."""
    es_policy: EarlyStopping | Any = "none"
    """Stops bad trials early: "none" stops none; "median", those whose best value so far is worse than the median of
    earlier trials at the same step; "asha", all but the best quarter at certain steps, each four times as late as the
    step before; or a pruner of Optuna's. The optimizers "asha" and "hyperband" stop trials by their own rule alone."""
    es_interval: int = 1
    """For "median", number of steps between two decisions about a trial; for "asha" and "hyperband", number of steps
    that each trial gets at least; for "asha", 1 means a hundredth of the steps of the first trial that ends."""
    es_min: int = 10
    """Number of trials that run to their end before "median" stops one."""

    def __post_init__(self) -> None:
        TrialsConfig.__post_init__(self)
        self._check_searchspace()
        self._check_algorithms()
        for name, least in (("es_interval", 1), ("es_min", 0)):
            check_count(name, getattr(self, name), least)
        if self.num_trials is not None:
            check_count("num_trials", self.num_trials, 1, ", or None for as many as timeout_s allows")
        elif self.timeout_s is None and self.optimizer != "grid":
            raise ValueError(
                "neither num_trials nor timeout_s is given, so the search would never end; give one, such as "
                "num_trials=50"
            )

    @property
    def reports_pass_losses(self) -> bool:
        """Return whether the mean loss of each pass over a loader stops bad trials, if the program logs no metric."""
        stops = self.es_policy != "none" or self.optimizer in ("asha", "hyperband")
        words = {word for word in re.split(r"[^a-z]+", self.optimization_key.lower()) if word}
        return stops and self.direction == "min" and "loss" in words and words <= {"loss", "train", "training"}

    def _check_searchspace(self) -> None:
        space = self.searchspace
        if isinstance(space, Mapping):
            if wrong := [name for name, each in space.items() if not _is_distribution(each)]:
                # The dict has Searchspace's own form, or is a mistake, which Searchspace.add explains.
                if any(_is_distribution(each) for each in space.values()):
                    raise ValueError(
                        f"searchspace has {wrong[0]}={space[wrong[0]]!r} beside Optuna's distributions; want all of "
                        "one kind"
                    )
                space = Searchspace()
                for name, spec in self.searchspace.items():  # type: ignore[union-attr]
                    space.add(name, spec)
                object.__setattr__(self, "searchspace", space)
        elif space is None or isinstance(space, type) or not (isinstance(space, Searchspace) or callable(space)):
            raise ValueError(
                f'searchspace is {space!r}; want a Searchspace, such as Searchspace(lr=("DOUBLE", [1e-5, 1e-1], '
                '"log")), a dict of Optuna\'s distributions, or a function of a trial'
            )
        names = space.keys() if isinstance(space, (Searchspace, Mapping)) else None
        if names is not None and not names:
            raise ValueError("searchspace is empty; to run once with fixed hparams, use TorchDistributedConfig")
        if both := [name for name in names or () if name in self.hparams]:
            raise ValueError(
                f"{both[0]!r} is in hparams and in searchspace; hparams has what all trials share, so drop one of them"
            )

    def _check_algorithms(self) -> None:
        methods = ("sample_relative", "sample_independent")
        self._check_algorithm("optimizer", get_args(Optimizer), "sampler", methods, "optuna.samplers.TPESampler(...)")
        pruner = "optuna.pruners.MedianPruner(...)"
        self._check_algorithm("es_policy", get_args(EarlyStopping), "pruner", ("prune",), pruner)
        if self.optimizer in ("asha", "hyperband") and not isinstance(self.es_policy, str):
            raise ValueError(
                f"optimizer={self.optimizer!r} stops trials by its own rule; with a pruner of yours, use "
                f"optimizer={'random' if self.optimizer == 'asha' else 'tpe'!r}"
            )
        if self.optimizer == "grid":
            if isinstance(self.searchspace, Searchspace):
                for each in self.searchspace.parameters:
                    each.grid()
            elif callable(self.searchspace):
                raise ValueError("optimizer='grid' needs a Searchspace or a dict; a function of a trial has no grid")

    def _check_algorithm(
        self, name: str, choices: tuple[str, ...], kind: str, methods: tuple[str, ...], example: str
    ) -> None:
        value = getattr(self, name)
        if isinstance(value, str):
            value = _MAGGYS_NAMES.get(value.lower(), value.lower())
            if value not in choices:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; want one of {', '.join(map(repr, choices))}, or a {kind} of "
                    f"Optuna's{nearest(value, choices)}"
                )
            object.__setattr__(self, name, value)
        elif isinstance(value, type) or not all(callable(getattr(value, each, None)) for each in methods):
            raise ValueError(
                f"{name} is {value!r}; want one of {', '.join(map(repr, choices))}, or a {kind} of Optuna's, such as "
                f"{example}"
            )


def _is_distribution(value: object) -> bool:
    """Return whether ``value`` is a distribution of Optuna's, without importing Optuna."""
    return any(
        each.__name__ == "BaseDistribution" and each.__module__.startswith("optuna.") for each in type(value).__mro__
    )
