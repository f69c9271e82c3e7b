"""A forward whose rows the ranks share out, where a probe has shown that each row is computed by itself.

Start with ``slicer.py``; ``probe.py`` decides, ``whole_batch.py`` gathers the outputs. See Note [Probe].
"""
