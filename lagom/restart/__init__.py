"""Runs that go on after a loss: what counts as a loss, and what the next attempt must know of the lost one.

Start with ``history.py``; with ``sleeping_twin.py`` for runs that go on in forks of the ranks.
"""
