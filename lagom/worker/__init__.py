"""What runs in a rank's own process.

Start with ``rank_process.py`` (the forked process, from fork to exit) and ``bootstrap.py`` (set up, train, report).
"""
