"""Gradients: collected in a backward, agreed upon, averaged over the ranks.

Start with ``backward.py`` (patches autograd), then ``replicate.py`` (what one backward exchanges).
"""
