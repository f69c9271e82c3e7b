"""``python -m lagom``: the command line."""

from __future__ import annotations

import sys

from lagom.cli import main

sys.exit(main())
