"""Patches of optimizers: for ZeRO, for learning rates, and for speed.

Start with ``step_patches.py``, which replaces the ``step`` of optimizers.
"""
