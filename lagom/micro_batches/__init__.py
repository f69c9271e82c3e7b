"""Forwards in micro-batches, for batches whose activations do not fit the device.

Start with ``split_forward.py``; ``examiner.py`` decides whether a forward may be split, and into how many parts.
"""
