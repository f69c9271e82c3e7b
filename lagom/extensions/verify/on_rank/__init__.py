"""A rehearsal on a rank: passes are cut short, and the program's actions are recorded.

Start with ``rehearsal.py``; ``record.py`` is the data for the driver.
"""
