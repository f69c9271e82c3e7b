"""``AblationStudy``: the components that an ablation study leaves out, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["feature", "features", "layer", "layers", "model"]
Feature = str | int


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One component to leave out.

    A pattern in ``layers`` stands for all layers that it matches: for the kind "layer" each is left out alone, for the
    kind "layers" all together.
    """

    kind: Kind
    name: str
    layers: tuple[str, ...] = ()
    """Dotted names of submodules, or patterns of these."""
    prefix: bool = False
    """Whether ``layers`` holds a prefix, which stands for all layers whose names begin with it."""
    replacement: Callable[[Any], Any] | None = None
    """Returns the module that replaces a layer, given that layer. None: see ``Layers.include``."""
    features: tuple[Feature, ...] = ()
    value: Any = None
    """Value that all samples have in place of a feature. None: see ``Features.include``."""
    drop: bool = False
    """Whether a feature's column or key is removed, instead of set to ``value``."""
    module: Callable[..., Any] | None = None
    """Makes the model that replaces the base model. None: the base model stays."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class AblationStudy:
    """Features of the data and layers of the model that an ablation leaves out, one component at a time.

    ``study.features.include("age", "fare")``, ``study.model.layers.include("encoder.layers.*", "dropout")``.

    Args:
        training_dataset_name: kept for programs that were written for Maggy; only ``to_dict`` returns it.
        training_dataset_version: likewise.
        label_name: name of the column to predict, which cannot be left out.
        dataset_generator: function that makes a data set. A training function with the parameter ``dataset_function``
            gets this function, changed so that its data set lacks the features that the trial leaves out.
        feature_names: names of the columns of a data set whose samples are tensors, for use in place of numbers.
    """

    def __init__(
        self,
        training_dataset_name: str | None = None,
        training_dataset_version: int = 1,
        label_name: str | None = None,
        *,
        dataset_generator: Callable[..., Any] | None = None,
        feature_names: Sequence[str] = (),
    ) -> None:
        if isinstance(feature_names, str):
            raise ValueError(f"feature_names is {feature_names!r}; want a list of names, one for each column")
        self.training_dataset_name = training_dataset_name
        self.training_dataset_version = training_dataset_version
        self.label_name = label_name
        self.dataset_generator = dataset_generator
        self.feature_names = tuple(feature_names)
        self.features = Features(label_name)
        self.model = Model()

    @property
    def components(self) -> list[Component]:
        """Return the components: features, groups of features, layers, groups of layers, models."""
        return [*self.features.components, *self.model.layers.components, *self.model.components]

    def to_dict(self) -> dict[str, Any]:
        """Return the study as plain values, under Maggy's names."""
        return {
            "training_dataset_name": self.training_dataset_name,
            "training_dataset_version": self.training_dataset_version,
            "label_name": self.label_name,
            "included_features": self.features.included_features,
            "included_layers": self.model.layers.included_layers,
            "included_groups": [list(group) for group in self.model.layers.included_groups],
            "custom_models": [one.name for one in self.model.components],
            "custom_dataset_generator": self.dataset_generator is not None,
        }

    def __repr__(self) -> str:
        names = ", ".join(map(str, self.components)) or "nothing"
        return f"AblationStudy that leaves out {names}"


class _Included:
    """Components by their names, in the order in which they were included."""

    def __init__(self) -> None:
        self._by_name: dict[str, Component] = {}

    def _add(self, component: Component) -> None:
        self._by_name[str(component)] = component

    def _remove(self, kind: Kind, name: str) -> None:
        self._by_name.pop(f"{kind} {name}", None)

    def _of_kind(self, kind: Kind) -> list[Component]:
        return [one for one in self._by_name.values() if one.kind == kind]


class Features(_Included):
    """The features to leave out: columns of tables, keys of samples, or numbers of a tensor's columns."""

    def __init__(self, label_name: str | None = None) -> None:
        super().__init__()
        self._label = label_name

    def include(self, *features: Feature | Sequence[Feature], value: Any = None, drop: bool = False) -> None:
        """Leave out each of ``features``, one at a time.

        Args:
            features: names, numbers of columns, or lists of these.
            value: value that all samples have instead; None: 0, for texts the most frequent text of the train set, or
                an empty text if the data set makes samples one by one.
            drop: remove the column or key, for programs that take the width of the model from the data.

        Raises:
            ValueError: for the study's ``label_name``, or what is neither a name nor a number.
        """
        for name in self._checked(features):
            self._add(Component(kind="feature", name=str(name), features=(name,), value=value, drop=drop))

    def include_groups(self, *groups: Sequence[Feature], value: Any = None, drop: bool = False) -> None:
        """Leave out each of ``groups``, lists of features, all features of a group together; else as ``include``."""
        for group in groups:
            names = _group("features", group, (str, int))
            self._checked(names)
            name = " + ".join(map(str, names))
            self._add(Component(kind="features", name=name, features=tuple(names), value=value, drop=drop))

    def exclude(self, *features: Feature | Sequence[Feature]) -> None:
        """Undo ``include`` for ``features``; groups with them stay included."""
        for name in _flat("features.exclude", features, (str, int)):
            self._remove("feature", str(name))

    def exclude_groups(self, *groups: Sequence[Feature]) -> None:
        """Undo ``include_groups`` for ``groups``, given with their features in the same order."""
        for group in groups:
            self._remove("features", " + ".join(map(str, group)))

    @property
    def components(self) -> list[Component]:
        """Return single features, then groups."""
        return [*self._of_kind("feature"), *self._of_kind("features")]

    @property
    def included_features(self) -> list[Feature]:
        """Return the single features."""
        return [one.features[0] for one in self._of_kind("feature")]

    def list_all(self) -> None:
        """Print the features, one a line."""
        for component in self.components:
            print(component.name)

    def _checked(self, features: Sequence[Any]) -> list[Feature]:
        names = list(_flat("features.include", features, (str, int)))
        if self._label is not None and self._label in names:
            raise ValueError(f"{self._label!r} is the label_name of the study; a model cannot be trained without it")
        return names


class Model:
    """The model of a study: the layers to leave out, and models of your own to compare."""

    def __init__(self) -> None:
        self.layers = Layers()
        self.base_model_generator: Callable[..., Any] | None = None
        self.components: list[Component] = []

    def set_base_model_generator(self, base_model_generator: Callable[..., Any]) -> None:
        """Set the module class or factory to use if the config has no ``module``."""
        if not callable(base_model_generator):
            raise ValueError(f"the base model generator is {base_model_generator!r}; want a class or function")
        self.base_model_generator = base_model_generator

    def add_custom_model_generator(self, custom_model_generator: Callable[..., Any], model_identifier: str) -> None:
        """Add a variant whose model ``custom_model_generator`` makes, shown as ``model_identifier``."""
        if not callable(custom_model_generator):
            raise ValueError(f"the model generator is {custom_model_generator!r}; want a class or function")
        self.components.append(Component(kind="model", name=model_identifier, module=custom_model_generator))

    @property
    def custom_model_generators(self) -> list[tuple[Any, str]]:
        """Return the generators and identifiers of the models that were added."""
        return [(one.module, one.name) for one in self.components]


class Layers(_Included):
    """The layers to leave out: submodules by the names of ``named_modules()``, or patterns such as "blocks.*".

    The signs "*", "?" and "[...]" of a pattern stand for characters within one part of a dotted name.
    """

    def include(self, *layers: str | Sequence[str], replacement: Callable[[Any], Any] | None = None) -> None:
        """Leave out each of ``layers``, one at a time. A pattern stands for each layer that it matches.

        Args:
            layers: names, patterns, or lists of these.
            replacement: called with the layer; returns the module that stands in its place. None: the layer's input
                passes through, which needs a layer whose output has the shape of its input; a ``ModuleList`` or
                ``ModuleDict`` becomes empty.
        """
        for name in _flat("layers.include", layers, (str,)):
            self._add(Component(kind="layer", name=name, layers=(name,), replacement=replacement))

    def include_groups(
        self, *groups: Sequence[str], prefix: str | None = None, replacement: Callable[[Any], Any] | None = None
    ) -> None:
        """Leave out each of ``groups``, lists of names or patterns, all layers of a group together.

        Args:
            prefix: a further group: all layers whose names begin with this text.
            replacement: as for ``include``; called for each layer of a group.
        """
        for component in self._groups(groups, prefix):
            self._add(replace(component, replacement=replacement))

    def exclude(self, *layers: str | Sequence[str]) -> None:
        """Undo ``include`` for ``layers``, names or patterns as they were given; groups with them stay included."""
        for name in _flat("layers.exclude", layers, (str,)):
            self._remove("layer", name)

    def exclude_groups(self, *groups: Sequence[str], prefix: str | None = None) -> None:
        """Undo ``include_groups`` for ``groups``, given in the same order, and for the group of ``prefix``."""
        for component in self._groups(groups, prefix):
            self._remove("layers", component.name)

    @property
    def components(self) -> list[Component]:
        """Return single layers, then groups."""
        return [*self._of_kind("layer"), *self._of_kind("layers")]

    @property
    def included_layers(self) -> list[str]:
        """Return the names and patterns of single layers."""
        return [one.name for one in self._of_kind("layer")]

    @property
    def included_groups(self) -> list[frozenset[str]]:
        """Return the groups; the group of a prefix contains the prefix alone."""
        return [frozenset(one.layers) for one in self._of_kind("layers")]

    def print_all(self) -> None:
        """Print the single layers."""
        names = self.included_layers
        print("\n".join(["Included single layers:", *names]) if names else "No single layers are included.")

    def print_all_groups(self) -> None:
        """Print the groups of layers."""
        names = [one.name for one in self._of_kind("layers")]
        print("\n".join(["Included groups of layers:", *names]) if names else "No groups of layers are included.")

    def _groups(self, groups: Sequence[Sequence[str]], prefix: str | None) -> Iterator[Component]:
        if prefix is not None:
            if not isinstance(prefix, str) or not prefix:
                raise ValueError(f"prefix is {prefix!r}; want the beginning of the names of layers")
            yield Component(kind="layers", name=f"{prefix}...", layers=(prefix,), prefix=True)
        for group in groups:
            names = _group("layers", group, (str,))
            yield Component(kind="layers", name=" + ".join(names), layers=tuple(names))


def is_pattern(name: str) -> bool:
    """Return whether ``name`` is a pattern, with "*", "?" or "["."""
    return any(sign in name for sign in "*?[")


def _flat(where: str, given: Sequence[Any], kinds: tuple[type, ...]) -> Iterator[Any]:
    for one in given:
        if isinstance(one, (list, tuple)):
            yield from _flat(where, one, kinds)
        elif isinstance(one, kinds) and not isinstance(one, bool) and one != "":
            yield one
        else:
            want = "names or numbers of columns" if int in kinds else "names"
            raise ValueError(f"{where}() got {one!r}; want {want}, or lists of these")


def _group(what: str, group: Any, kinds: tuple[type, ...]) -> list[Any]:
    names = list(_flat(f"{what}.include_groups", group, kinds)) if isinstance(group, (list, tuple)) else []
    if len(names) < 2 and not (names and isinstance(names[0], str) and is_pattern(names[0])):
        raise ValueError(
            f"{what}.include_groups() got {group!r}; want a list of at least two names, which are left out together; "
            f"{what}.include() takes single ones"
        )
    return names
