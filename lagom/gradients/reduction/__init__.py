"""Reductions: combine the gradients of all ranks into one, by the mean (compressed or not) or by Adasum.

Start with ``mean.py``; ``buckets.py`` and ``layout.py`` decide which gradients travel together.
"""
