"""Reductions: combine the gradients of all ranks by the mean (compressed or not) or by Adasum.

Start with ``mean.py`` (the interface ``Reduction``, and the plain mean). ``sliced.py`` has the others:
fp16, bf16 and Adasum. ``layout.py`` decides which gradients travel together. Small gradients are packed by
``PackedTensors`` in ``exchange/agreement_exchange.py``; ``buckets.py`` averages large gradients in the background.
"""
