"""A rehearsal on a rank: passes cut short, what the program does noted down.

Start with ``rehearsal.py``; ``record.py`` is what the driver gets.
"""
