"""Forwards in micro-batches, for batches whose activations do not fit the device.

Start with ``split_forward.py``, which decides; ``runner.py`` runs the parts, and finds out whether one fits.
"""
