"""A run on one rank: its state, and the list of all patches.

Start with ``patched.py``, which lists the patches of all rooms in order. ``session.py`` is the state that they share.
"""
