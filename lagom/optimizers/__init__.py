"""Patches of optimizers: for extensions that step them, for learning rates, and for speed.

Start with ``step_patches.py``, which replaces the ``step`` of optimizers. ``state_placeholder.py`` is for extensions
that keep an optimizer's state elsewhere.
"""
