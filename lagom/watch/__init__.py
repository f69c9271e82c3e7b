"""A run as its user sees it: progress, output, stalls and stragglers while it runs, and its folder afterwards.

Start with ``progress.py`` (the display) and ``run_dir.py`` (the folder).
"""
