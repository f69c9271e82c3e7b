"""Reductions: combine the gradients of all ranks by the mean (compressed or not) or by Adasum.

Start with ``buckets.py``: the interface ``Reduction`` and the plain mean; which gradients travel together
(``Layout``); and buckets of large gradients, which are averaged in the background. ``sliced.py`` has fp16, bf16 and
Adasum. Small gradients are packed by ``PackedTensors`` in ``exchange/agreement_exchange.py``.
"""
