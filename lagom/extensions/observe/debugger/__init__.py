"""A debugger on a rank: pdb runs in the rank, and its prompt is the driver's terminal or notebook.

``rank_debugger.py`` is the rank's end and ``rank_pdb.py`` pdb itself; ``terminal.py`` is the driver's end. Start with
Note [Stopped ranks] in ``rank_debugger.py``.
"""
