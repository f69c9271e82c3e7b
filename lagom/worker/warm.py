"""Imports, in the process that ranks are forked from, of all that would cost every one of them time."""

from __future__ import annotations

import lagom.worker.bootstrap  # noqa: F401
