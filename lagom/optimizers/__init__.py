"""Steps of optimizers: patches for ZeRO, learning rates, and fewer calls.

Start with ``step_patches.py``.
"""
