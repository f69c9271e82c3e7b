"""The extensions of lagom, a line for each, and the fields that they add to the config.

An import line below is all that adds an extension. Type checkers know a base class only by its name in a class
statement, not from a list: so that mypy and editors know the fields in ``TorchDistributedConfig(...)`` and
``config.field``, the line also imports the class with the settings, which ``ExtensionSettings`` names a second time for
them. At run time the bases come from ``Extension.settings``.
"""

# ruff: noqa: F401 -- EXTENSIONS has what is imported here

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lagom.errors import LagomError
from lagom.extension import Extension, Settings

# In the order in which a run enters them. Resume comes after Zero, whose shards are in snapshots, and before Data: it
# opens the snapshots that files of DataFrames are kept for.
# isort: off
from lagom.extensions.compat import Compat
from lagom.extensions.search import Search
from lagom.extensions.zero import Zero, ZeroSettings
from lagom.extensions.resume import Resume, ResumeSettings
from lagom.extensions.data import Data
from lagom.extensions.verify import Verify, VerifySettings
from lagom.extensions.observe import Observe, ObserveSettings
# isort: on

if TYPE_CHECKING:
    from lagom.plan import Plan
    from lagom.run_folder import RunFolder

EXTENSIONS: tuple[Extension, ...] = tuple(
    imported()
    for imported in list(vars().values())
    if isinstance(imported, type) and issubclass(imported, Extension) and imported is not Extension
)
"""One instance of each extension, in the order of the imports above."""

if TYPE_CHECKING:

    class ExtensionSettings(ZeroSettings, ResumeSettings, VerifySettings, ObserveSettings):
        """Fields of the config that extensions define, as type checkers and editors know them."""

else:

    @dataclass(frozen=True, kw_only=True, eq=False)
    class ExtensionSettings(*(each.settings for each in EXTENSIONS if each.settings is not Settings)):
        """Fields of the config that extensions define."""


def host_server(plan: Plan) -> Callable[..., None] | None:
    """Return the function that serves a host process instead of one run of its ranks; None: there is no other."""
    servers = (extension.serves_host(plan) for extension in EXTENSIONS)
    return next((server for server in servers if server is not None), None)


def wanted(plan: Plan) -> Iterator[Extension]:
    """Yield the extensions that a run with ``plan`` uses."""
    return (extension for extension in EXTENSIONS if extension.is_wanted(plan))


def replaced_arguments(provided: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a run with what extensions put in the place of some; see ``Extension.provided``."""
    for extension in EXTENSIONS:
        provided = extension.provided(provided)
    return provided


def report(folder: RunFolder) -> str:
    """Return an HTML page about the recorded run in ``folder``; see ``Extension.report``."""
    page = next(filter(None, (extension.report(folder) for extension in EXTENSIONS)), "")
    if not page:
        raise LagomError("this installation of lagom has no extension that makes reports")
    return page


def predictor(model: Any, settings: Mapping[str, Any]) -> Any:
    """Return an object that applies the model of a result to rows.

    Scoring takes no part in a run, and so has no ``Extension``: ranks need not import it.
    """
    try:
        from lagom.extensions.scoring.predictor import Predictor
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("lagom."):
            raise
        raise LagomError("this installation of lagom has no extension that scores rows") from error
    return Predictor(model, **settings)


def notebook_charts(folder: RunFolder) -> str:
    """Return HTML that a notebook shows below the result of the run in ``folder``; "" for nothing."""
    return "".join(extension.notebook_chart(folder) for extension in EXTENSIONS)
