"""A run's folder as a page of HTML, the comparison of two runs, and the charts of notebooks.

Start with ``report.py``.
"""
