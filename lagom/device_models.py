"""``DeviceModel``: what the numbers of an accelerator may depend on, and a sentence about ranks that differ in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lagom.cluster import device_word


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModel:
    """Properties on which the numbers of an accelerator may depend. See Note [Numbers of a model]."""

    kind: str
    name: str
    multiprocessors: int | None
    """Number of parts that compute at the same time; None if the kind does not tell."""
    driver: str
    """Version of the maker's driver; "" if unknown."""

    @property
    def words(self) -> str:
        """The model as a text for the user."""
        parts = [f"{self.multiprocessors} multiprocessors"] if self.multiprocessors else []
        parts += [f"driver {self.driver}"] if self.driver else []
        return f"{self.name} ({', '.join(parts)})" if parts else self.name


def describe_differences(models: Mapping[str, DeviceModel | None]) -> str:
    """Return a sentence about ``models`` that differ, by their owners' names; "" if all are equal.

    None stands for the CPU.
    """
    owners: dict[DeviceModel | None, list[str]] = {}
    for owner, model in models.items():
        owners.setdefault(model, []).append(owner)
    if len(owners) < 2:
        return ""
    told = "; ".join(f"{_some(names)}: {model.words if model else 'the CPU'}" for model, names in owners.items())
    word = device_word(next((model.kind for model in owners if model is not None), ""))
    return (
        f"{word}s differ in model, multiprocessors or driver ({told}): random numbers that a model draws on them "
        "(dropout) may differ although the seed is the same, and sums in their last digits"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


# Note [Numbers of a model]
#
# Two accelerators of different models do not give the same numbers for the same program and seed. A kernel of CUDA that
# draws random numbers has as many threads as the device holds at once, and each thread draws from a stream of its own:
# so the masks of dropout depend on the number of multiprocessors (PyTorch issues 196613 and 196733). A MIG slice has
# fewer of them than the whole GPU. Libraries also choose their kernels by model and driver, so sums differ in their
# last digits. lagom cannot change this, so it compares model, multiprocessors and driver of all ranks at the start of a
# run, and of a snapshot with those of the process that resumes, and says in one line what may differ.
