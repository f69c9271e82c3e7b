"""The display of a run while it goes on: progress, output, stalls, stragglers.

Start with ``progress.py``.
"""
