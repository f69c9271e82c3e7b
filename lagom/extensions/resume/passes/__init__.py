"""Passes over loaders in a snapshot, and their workers. Start with ``loader_positions.py``."""
