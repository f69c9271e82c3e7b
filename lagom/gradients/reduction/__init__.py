"""What makes one gradient out of those of all ranks: the mean, compressed or not, or Adasum.

Start with ``mean.py``; ``buckets.py`` and ``layout.py`` say what travels together.
"""
