"""Spans of the program's calls of torch, for timelines: loaders, backwards, steps, exchanges.

Start with ``program_spans.py``.
"""
