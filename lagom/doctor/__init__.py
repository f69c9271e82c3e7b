"""``lagom doctor``: checks whether runs will work on this cluster, and says how to repair what will not.

Start reading at ``visit.py``.
"""
