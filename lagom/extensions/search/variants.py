"""``variants``: variants of the program for an ablation study; resolves patterns and checks names before any start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lagom.config.ablation_study import AblationStudy, Component, is_pattern
from lagom.extensions.search.on_rank.layer_names import check_layer, matching, outermost
from lagom.program.signature import makes_data
from lagom.settings import nearest

BASE = "base"
_PARTS = ("module", "model", "model_function")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The program unchanged (the base), or without one component."""

    name: str
    component: int | None = None
    """Index of the component in ``study.components``; None for the base."""
    layers: tuple[str, ...] = ()
    """Names of the layers to leave out, with patterns resolved; empty if the component has no layers."""


def variants(study: AblationStudy, train: Callable[..., Any], provided: Mapping[str, Any]) -> list[Variant]:
    """Return the base and a variant for each component.

    A pattern of single layers gives a variant for each layer that it matches; a group of layers gives one variant.

    Raises:
        ValueError: if the study leaves out nothing, two things under one name, or something that the program does not
            take from the config or that, as far as the driver can tell, does not exist.
    """
    if not study.components:
        raise ValueError(
            "the ablation study leaves out nothing: study.features.include('age'), or "
            "study.model.layers.include('encoder.layers.*')"
        )
    layers = _Layers(train, provided)
    _check_features(study, provided)
    all_variants = [Variant(name=BASE)]
    for number, component in enumerate(study.components):
        if component.layers:
            all_variants += _of_layers(number, component, layers)
        else:
            if component.module is not None:
                layers.check_asked(str(component))
            all_variants.append(Variant(name=str(component), component=number))
    unique: dict[str, Variant] = {}
    for variant in all_variants:
        first = unique.setdefault(variant.name, variant)
        if _stands_in(study, first) != _stands_in(study, variant):
            raise ValueError(
                f"the ablation study has two variants that are called {variant.name!r}, with different models or "
                "replacements: name each model differently, and include a layer with one replacement only"
            )
    return list(unique.values())


def _stands_in(study: AblationStudy, variant: Variant) -> Any:
    """Return the functions that make what stands in the place of the model or layers; None for the base."""
    if variant.component is None:
        return None
    component = study.components[variant.component]
    return component.module, component.replacement


def _of_layers(number: int, component: Component, layers: _Layers) -> list[Variant]:
    names = layers.resolved(component)
    if component.kind == "layer":
        return [Variant(name=f"layer {name}", component=number, layers=(name,)) for name in names]
    return [Variant(name=str(component), component=number, layers=tuple(outermost(names)))]


class _Layers:
    """The layers of the program's model, as far as the driver knows them."""

    def __init__(self, train: Callable[..., Any], provided: Mapping[str, Any]) -> None:
        self._train = train
        self._provided = provided
        self._names: list[str] | None = None
        self._read = False

    def check_asked(self, component: str) -> None:
        """Check that the program makes its models from the config's module.

        The function must have a parameter for the module, except where layers of a class are left out: there a patch
        changes the class itself.

        Raises:
            ValueError: if the config has no module, or the function has no such parameter.
        """
        from inspect import signature

        module = self._provided.get("module")
        if module is None:
            raise ValueError(
                f"the {component} can be left out of a model that is made from the config alone: give the class or "
                "factory by module=, and let the function make its model by module(...)"
            )
        asked = signature(self._train).parameters
        is_class = isinstance(module, type) and not component.startswith("model ")
        if not is_class and not any(name in asked for name in _PARTS):
            raise ValueError(
                f"the {component} cannot be left out: the function has no parameter 'module', so it makes its model "
                "without the config's"
            )

    def resolved(self, component: Component) -> list[str]:
        """Return the names of the layers that ``component`` stands for.

        Raises:
            ValueError: for a name or pattern that matches no layer, or a pattern if the layers are not known here.
        """
        self.check_asked(str(component))
        names = self._known()
        matched: list[str] = []
        for given in component.layers:
            if component.prefix or is_pattern(given):
                matched += self._matched(given, names, component.prefix)
            else:
                if names is not None:
                    check_layer(given, names, self._title())
                matched.append(given)
        return list(dict.fromkeys(matched))

    def _matched(self, given: str, names: Sequence[str] | None, prefix: bool) -> list[str]:
        what = "prefix" if prefix else "pattern"
        if names is None:
            raise ValueError(
                f"the layers of {self._title()} are not known here, since it cannot be built without the function's "
                f"arguments, so the {what} {given!r} cannot be resolved: write the names out"
            )
        found = [name for name in names if name.startswith(given)] if prefix else matching(given, names)
        if not found:
            raise ValueError(f"{self._title()} has no layer that the {what} {given!r} matches{nearest(given, names)}")
        return found

    def _title(self) -> str:
        module = self._provided["module"]
        return "module" if isinstance(module, (list, tuple)) else getattr(module, "__name__", type(module).__name__)

    def _known(self) -> list[str] | None:
        if not self._read:
            self._read = True
            try:
                from lagom.extensions.search.on_rank.built_layers import layer_names
            except ImportError:  # a driver without torch
                return None
            self._names = layer_names(self._provided["module"], self._provided["hparams"])
        return self._names


def _check_features(study: AblationStudy, provided: Mapping[str, Any]) -> None:
    components = [one for one in study.components if one.features]
    if not components or study.dataset_generator is not None:
        return
    data = provided.get("train_set", provided.get("test_set"))
    if data is None or isinstance(data, str):
        given = "no train_set" if data is None else f"the text {data!r} for a data set"
        raise ValueError(
            f"the {components[0]} cannot be left out: the config has {given}. Give a data set, a DataFrame, or a "
            "function that makes one, by train_set="
        )
    if makes_data(data):  # a function that makes the data set runs on the ranks, which then check the names
        return
    if hasattr(data, "sparkSession"):
        from lagom.extensions.search.on_rank.feature_columns import check_feature

        for name in [name for component in components for name in component.features]:
            check_feature(name, list(data.columns), "DataFrame")
        return
    from lagom.extensions.search.on_rank.left_out_features import check_features

    for component in components:
        check_features(data, component.features, study.feature_names, component.value, component.drop)
