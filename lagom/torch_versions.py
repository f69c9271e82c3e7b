"""The versions of torch that lagom is tested with."""

from __future__ import annotations

import re

OLDEST = (2, 6)
NEWEST = (2, 15)


def untried(version: str) -> str:
    """Return a line that says that lagom is not tested with ``version`` of torch; "" if it is."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return ""
    tried = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
    return (
        f"torch {version} is untried: lagom is tested with {tried}, and replaces functions of torch; "
        "verify=True shows whether this program's numbers are right"
    )
