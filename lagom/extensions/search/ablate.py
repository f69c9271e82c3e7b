"""``ablate``: train a function without each of its components, and compare."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

from lagom.config import AblationConfig
from lagom.driver.preparation import provided_arguments
from lagom.extensions.search.ablation_result import AblationResult
from lagom.extensions.search.ablation_trials import AblationTrials
from lagom.extensions.search.run_trials import run_trials
from lagom.extensions.search.variants import variants


def ablate(train: Callable[..., Any], config: AblationConfig) -> AblationResult:
    """Run the trials of an ablation study; on Ctrl-C, return the results so far.

    Raises:
        ValueError: if the study leaves out nothing, something that the program does not take from the config, or
            something that, as far as the driver can tell, does not exist; nothing has been started then.
        PayloadError: if the function, its data or the study cannot be pickled.
        PlanError: if a trial does not fit the cluster, or a setting (verify, timeline) is for one run only.
        LagomError: if no slot is left, or the study to resume is another one or still running.
        MetricError: if a trial has no metric, and no trial has completed before.
        Exception: if ``max_failed_trials`` trials in a row have failed, the exception of the last one (a LagomError if
            its processes were lost). An AblationError does not count.
    """
    extra = config.extra_arguments()
    all_variants = variants(config.ablation_study, train, provided_arguments(config.of_a_trial()) | extra)
    end = time.monotonic() + config.timeout_s if config.timeout_s is not None else math.inf
    trials, ran = run_trials(
        train,
        config,
        lambda folder: AblationTrials(all_variants, config.seed_values, folder, end),
        num_trials=len(all_variants) * len(config.seed_values),
        extra=extra,
    )
    return AblationResult(
        trials.trials(),
        effects=trials.effects(),
        base=trials.base_value,
        num_seeds=len(config.seed_values),
        seed_ignored=trials.is_seed_ignored(),
        direction=config.direction or "max",
        hparams=config.hparams,
        metric=config.optimization_key,
        **dataclasses.asdict(ran),
    )
