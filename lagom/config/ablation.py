"""``AblationConfig``: settings to train a function without one component at a time, and to compare the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from lagom.config.ablation_study import AblationStudy
from lagom.config.torch_distributed import TorchDistributedConfig
from lagom.config.trials import TrialsConfig
from lagom.settings import explain_fields

STUDY = "ablation_study"
"""Key of the study among a call's arguments, so that the study's functions travel in one pickle with the program."""


@explain_fields
@dataclass(frozen=True, kw_only=True, eq=False)
class AblationConfig(TrialsConfig):
    """Settings of an ablation study: it trains a function with and without each component, and compares the metrics.

    A component is, for example, a feature of the data or a layer of the model. The fields of ``TorchDistributedConfig``
    apply to each trial, except ``timeout_s``, ``name``, ``description`` and ``run_dir``, which apply to the study.
    ``world_size``, ``verify``, ``timeline``, ``debug`` and ``snapshot_every_s`` must keep their default values.

    Raises:
        ValueError: when a field has a value it cannot have; nothing has been started then.
    """

    ablation_study: AblationStudy = field(default_factory=AblationStudy)
    """The components to leave out."""
    ablator: str = "loco"
    """Method: "loco" leaves out one component at a time."""
    seeds: int | Sequence[int] = 3
    """Seeds with which the base and each variant are trained: a list of seeds, or a number k for ``seed``, ``seed`` +
    1, ... (0, 1, ... if ``seed`` is None). With two seeds or more, differences have a confidence interval. 1: one trial
    each, with ``seed``, or with the random states of the calling process if ``seed`` is None."""

    def __post_init__(self) -> None:
        TrialsConfig.__post_init__(self)
        if not isinstance(self.ablation_study, AblationStudy):
            raise ValueError(f"ablation_study is {self.ablation_study!r}; want an AblationStudy")
        if not isinstance(self.ablator, str) or self.ablator.lower() != "loco":
            raise ValueError(f"ablator is {self.ablator!r}; want 'loco', which leaves out one component at a time")
        given: Any = self.seeds
        first = self.seed or 0
        seeds = range(first, first + given) if isinstance(given, int) and not isinstance(given, bool) else given
        is_list = isinstance(seeds, (list, tuple, range))
        if not is_list or not seeds or not all(map(_is_seed, seeds)) or len(set(seeds)) < len(seeds):
            raise ValueError(
                f"seeds is {self.seeds!r} and seed is {self.seed!r}; want a number of seeds, or a list of different "
                "seeds, from 0 to 2**32 - 1"
            )

    @property
    def seed_values(self) -> list[int | None]:
        """Return the seed of each repetition; None for one that starts from the calling process's random states."""
        if not isinstance(self.seeds, int):
            return list(self.seeds)
        if self.seeds == 1:
            return [self.seed]
        first = self.seed or 0
        return list(range(first, first + self.seeds))

    def of_a_trial(self) -> TorchDistributedConfig:
        """Return the config of one trial, without its seed, which ``ablation_change.py`` sets."""
        shared = {each.name: getattr(self, each.name) for each in fields(TorchDistributedConfig)}
        module = self.module if self.module is not None else self.ablation_study.model.base_model_generator
        ranks = {"world_size": self.ranks_per_trial, "timeout_s": self.trial_timeout_s}
        return TorchDistributedConfig(**shared | ranks | {"module": module, "seed": None})

    def extra_arguments(self) -> dict[str, Any]:
        """Return the arguments that only trials get: the study, and the arguments under Maggy's names."""
        study = self.ablation_study
        found: dict[str, Any] = {STUDY: study}
        if (module := self.of_a_trial().module) is not None:
            found["model_function"] = found["model"] = module
        if study.dataset_generator is not None or self.train_set is not None or self.dataset is not None:
            found["dataset_function"] = study.dataset_generator
        return found


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32
