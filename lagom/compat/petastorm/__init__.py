"""Petastorm 0.12.1 works with the pyarrow, numpy and pandas of today once this has been imported.

Within a lagom run that happens when the program imports petastorm. See Note [Another world for one package].
"""

from __future__ import annotations

# Relative, here and beside: these files travel to processes that have no lagom, under another name.
from . import finder

finder.install()
