"""The name by which programs import ``lagom.extensions.compat.petastorm``."""

import sys
from typing import TYPE_CHECKING

from lagom.extensions.compat import petastorm

if TYPE_CHECKING:
    from lagom.extensions.compat.petastorm import *  # noqa: F403

sys.modules[__name__] = petastorm
