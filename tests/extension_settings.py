"""The settings of extensions that tests of the trunk get as parameters too."""

from __future__ import annotations

from tests.sources import ROOT

SETTINGS = {
    **dict.fromkeys(("zero_lvl", "backend", "deepspeed_config"), "zero"),
    "snapshot_every_s": "resume",
    "verify": "verify",
    "timeline": "observe",
    "debug": "observe",
}
"""The extension of each of these settings, also of an extension that has been removed."""
INSTALLED = {path.parent.name for path in (ROOT / "lagom" / "extensions").glob("*/__init__.py")}
"""Names of the extensions."""
