"""The name by which programs import ``lagom.extensions.compat.maggy``."""

import sys
from typing import TYPE_CHECKING

from lagom.extensions.compat import maggy

if TYPE_CHECKING:
    from lagom.extensions.compat.maggy import *  # noqa: F403

sys.modules[__name__] = maggy
