"""What a run shows while it goes on: progress, output, stalls, stragglers.

Start with ``progress.py``.
"""
