"""Timelines: spans of the program's calls of torch on each rank, merged into one trace and a breakdown of time.

Start with ``program_spans.py`` (on a rank) and ``timeline.py`` (on the driver).
"""
