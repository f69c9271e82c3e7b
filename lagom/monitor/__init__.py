"""The display of a run while it goes on: progress, output, stalls, stragglers. ``spans.py`` records its timeline.

Start with ``progress.py``.
"""
