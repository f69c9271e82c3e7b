"""A run on one rank: its state, and the list of all patches.

Start with ``patched.py``, which lists the patches of all packages in order. ``session.py`` is the state that the
patches share, with groups of its fields in ``state_groups.py``. ``call_changes.py`` names the program's objects that a
call has changed.
"""
