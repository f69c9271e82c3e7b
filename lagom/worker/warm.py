"""Imports, in the process that ranks are forked from, of all that would cost every one of them time."""

from __future__ import annotations

import torch._dynamo  # noqa: F401  (0.7 s, which an optimizer's first step would take in every rank)

import lagom.worker.bootstrap  # noqa: F401
