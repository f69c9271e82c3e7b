"""Forwards in parts of a batch, for batches whose activations do not fit the device.

Start with ``split_forward.py``; ``examiner.py`` finds out whether, and in how many parts.
"""
