"""``Call``: the function and its arguments, as they travel from the driver to the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A function with its arguments, for one run; ``Plan`` holds the settings of the run."""

    function: Callable[..., Any]
    """The training function."""
    provided: Mapping[str, Any]
    """Arguments by name: the fields of the config that a function can ask for, ``hparams`` among them."""
    random_states: Mapping[str, Any] | None = None
    """States of the driver's generators, from which ranks start; None if the plan has a seed, or nothing is random."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the driver's process, from ``process_settings``; empty leaves the rank's process as it is."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Texts of the program's source files, by the file names in its code objects; empty without snapshots."""
