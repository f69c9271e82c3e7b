"""Spans of a rank's time, for timelines: loaders, forwards, backwards, steps, exchanges.

Start with ``program_spans.py``.
"""
