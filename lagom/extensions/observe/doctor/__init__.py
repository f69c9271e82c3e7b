"""``lagom doctor``: checks whether runs will work on this cluster, and gives a remedy for each problem.

Start reading at ``visit.py``.
"""
