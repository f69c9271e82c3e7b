"""APIs of Horovod, Maggy and petastorm, served by lagom or made to work beside it.

Start with ``compatible.py``, which loads the packages of this folder when a program imports what they stand for.
"""

from __future__ import annotations

from lagom.extension import Extension


class Compat(Extension):
    """Programs that were written for other projects."""

    name = "compat"
