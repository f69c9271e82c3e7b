"""``AblationChange``: leaves a component out of one trial's call, and starts the trial from its seed."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lagom.config.ablation import STUDY
from lagom.config.ablation_study import AblationStudy, Component
from lagom.program.signature import Call, makes_data
from lagom.random_states import random_states, set_random_states


@dataclass(frozen=True, slots=True)
class AblationChange:
    """Gives a call the data sets and the module of a variant, and the random numbers of ``seed``."""

    component: int | None
    """Index of the component in ``study.components``; None for the base, with all components."""
    layers: tuple[str, ...]
    """Names of the layers to leave out, with patterns resolved; empty: the layers in ``Component.layers``."""
    seed: int | None
    """None: the random states of the calling process."""

    def __call__(self, call: Call) -> Call:
        """Return ``call`` without the component, with the seed, and with its arguments under Maggy's names too."""
        study: AblationStudy = call.provided[STUDY]
        changed = call
        if self.component is not None:
            changed = _without_features(changed, study, study.components[self.component])
            changed = _with_module(changed, study.components[self.component], self.layers)
        changed = _with_maggys_names(changed)
        return changed if self.seed is None else _seeded(changed, self.seed)


def _without_features(call: Call, study: AblationStudy, component: Component) -> Call:
    if not component.features:
        return call
    from lagom.extensions.search.on_rank.left_out_features import leave_out_features

    provided = dict(call.provided)
    leave_out = functools.partial(
        leave_out_features,
        features=component.features,
        names=study.feature_names,
        value=component.value,
        drop=component.drop,
    )
    if study.dataset_generator is not None:
        provided["dataset_function"] = _generator(study.dataset_generator, leave_out)
    sets = leave_out(provided.get("train_set"), provided.get("test_set"))
    provided |= {name: data for name, data in zip(("train_set", "test_set"), sets, strict=True) if name in provided}
    if "dataset" in provided:
        provided["dataset"] = list(sets)
    return dataclasses.replace(call, provided=provided)


def _generator(make: Callable[..., Any], leave_out: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(make)
    def dataset_function(*args: Any, **named: Any) -> Any:
        made = make(*args, **named)
        is_pair = isinstance(made, (list, tuple)) and len(made) == 2 and not hasattr(made[0], "ndim")
        return type(made)(leave_out(*made)) if is_pair else leave_out(made, None)[0]

    return dataset_function


def _with_module(call: Call, component: Component, layers: tuple[str, ...]) -> Call:
    if component.module is not None:
        return dataclasses.replace(call, provided={**call.provided, "module": component.module})
    if not component.layers:
        return call
    from lagom.extensions.search.on_rank.left_out_layers import without_layers

    function, module = without_layers(
        call.function, call.provided["module"], layers or component.layers, component.replacement
    )
    return dataclasses.replace(call, function=function, provided={**call.provided, "module": module})


def _with_maggys_names(call: Call) -> Call:
    """Provide arguments under Maggy's names: ``model``, ``model_function`` and ``dataset_function``."""
    study: AblationStudy = call.provided[STUDY]
    provided = dict(call.provided)
    if "module" in provided:
        provided["model_function"] = provided["model"] = provided["module"]
    if study.dataset_generator is None and "train_set" in provided:
        provided["dataset_function"] = functools.partial(_made, provided["train_set"])
    return dataclasses.replace(call, provided=provided)


def _made(data: Any) -> Any:
    return data() if makes_data(data) else data


def _seeded(call: Call, seed: int) -> Call:
    """Return ``call`` with the random states of ``seed``.

    The seed is also set in ``hparams``, if these have a "seed" or the function has a parameter ``seed``.
    """
    from lagom.run_state.random_streams import seed_everything

    before = random_states()
    seed_everything(seed)
    states = random_states() | {"entropy": seed}
    set_random_states(before)
    provided = dict(call.provided)
    if "seed" in provided["hparams"] or "seed" in inspect.signature(call.function).parameters:
        provided["hparams"] = {**provided["hparams"], "seed": seed}
    return dataclasses.replace(call, provided=provided, random_states=states)
