"""A run as its user sees it: progress, output, stalls and stragglers while it runs, and its folder afterwards.

Start with ``progress.py`` (the display) and ``run_dir.py`` (the folder). ``html_page.py``, ``chart.py`` and
``interval_chart.py`` draw the pages that extensions make of a folder.
"""
