"""Forwards in micro-batches, for batches whose activations do not fit the device.

Start with ``split_forward.py``, which decides whether to split a call; ``runner.py`` runs the parts.
"""
