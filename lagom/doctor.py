"""``visit`` and ``print_findings``: what ``lagom doctor`` does, for a notebook."""

from __future__ import annotations

from lagom.extensions.observe.doctor.visit import print_findings, visit

__all__ = ["print_findings", "visit"]
