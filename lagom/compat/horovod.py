"""The name by which programs import ``lagom.extensions.compat.horovod``."""

import sys
from typing import TYPE_CHECKING

from lagom.extensions.compat import horovod

if TYPE_CHECKING:
    from lagom.extensions.compat.horovod import *  # noqa: F403

sys.modules[__name__] = horovod
