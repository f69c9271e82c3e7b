"""``SettableTrials``: base of Maggy's configs of searches and ablation studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from lagom import config
from lagom.extensions.compat.maggy.settable import Settable, by_position

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

_LAST = (("dataset",), ("train_set", "test_set"))
"""The last fields by position, in Maggy 1.1 and in Maggy 1.0."""


class SettableTrials(Settable):
    """A config of trials that takes ``model`` for ``module``, and keeps a ``dataset`` that is no pair in ``sets``."""

    __slots__ = ()

    def _set_up(
        self, names: Sequence[str], positional: Sequence[Any], given: Mapping[str, Any], **defaults: Any
    ) -> None:
        """Initialise the config from the arguments of Maggy's class.

        Args:
            names: names of the fields that can be passed by position, in order, without the data sets at the end.
            positional: the values that were passed by position.
            given: the values that were passed by name.
            defaults: values of fields that are not given, where they differ from those of lagom's config.
        """
        last = _LAST[len(positional) > len(names) + 1]
        settings = {**defaults, **given, **by_position(type(self).__name__, (*names, *last), positional, given)}
        if "model" in settings:
            settings["module"] = settings.pop("model")
        sets = settings.get("dataset")
        if isinstance(sets, (list, tuple)) and len(sets) != 2:
            del settings["dataset"]
        else:
            sets = None
        super().__init__(**settings)
        object.__setattr__(self, "sets", sets)

    @property
    def model(self) -> Any:
        """Return ``module``, by Maggy's name."""
        return self.module  # type: ignore[attr-defined]  # the config's

    def with_defaults(self, given: Mapping[str, Any]) -> Self:
        """Return a copy in which fields that have a run's default values take the values in ``given``.

        Args:
            given: fields of ``TorchDistributedConfig``. ``world_size`` gives ``num_slots``, the number of trials at a
                time, unless this config has it.
        """
        own = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        plain = config.TorchDistributedConfig()
        for name, value in given.items():
            if name == "world_size":
                own["num_slots"] = own["num_slots"] or value
            elif own[name] == getattr(plain, name):
                own[name] = value
        copied = type(self)(**own)
        object.__setattr__(copied, "sets", self.sets)  # type: ignore[attr-defined]  # an attribute of the config
        return copied
