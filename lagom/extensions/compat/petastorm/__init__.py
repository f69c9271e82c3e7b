"""Makes petastorm 0.12.1 work with today's pyarrow, numpy and pandas, once this package is imported.

Within a lagom run, the program's own import of petastorm imports this package. See Note [Another world for one package]
in ``finder.py``.
"""

from __future__ import annotations

# Imports are relative in this folder: its files travel to processes without lagom, under another name.
from . import finder

finder.install()
