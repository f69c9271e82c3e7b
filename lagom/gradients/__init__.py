"""Gradients: collected in a backward, agreed upon, averaged over the ranks.

Start with ``backward.py`` (patches autograd), then ``gradient_averager.py`` (what one backward exchanges).

Collect: ``backward_gradients.py`` keeps a backward's gradients apart, ``accumulation.py`` joins several backwards.
Agree: ``initial_values.py``, ``divergence.py`` and ``buffers.py`` compare what must be equal on all ranks.
Reduce: ``tensor_averager.py`` sends small gradients in one exchange, ``overlap.py`` and ``bucket_pipeline.py`` send
large ones while the backward goes on; ``reduction/`` is the arithmetic. ``autograd_grad.py`` serves
``torch.autograd.grad``; ``batched_roots.py`` takes several gradients at once one after another.
"""
