"""A run on one rank: its state, and the list of all patches.

Start with ``patched.py``: which rooms patch torch, and in which order. ``session.py`` is the state that they share.
"""
