"""The process of one rank.

Start with ``rank_process.py`` (the forked process, from fork to exit) and ``bootstrap.py`` (set up, train, report).
"""
