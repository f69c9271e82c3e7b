"""Gradients: collected in a backward, agreed upon, averaged over the ranks.

Start with ``backward.py`` (patches autograd), then ``gradient_averager.py`` (what one backward exchanges).

Collect: ``backward_gradients.py`` keeps a backward's gradients apart, that of a shared parameter once;
``accumulation.py`` joins several backwards, ``cached_backward.py`` recognizes repeated ones.
Agree: ``gradient_averager.py`` and ``divergence.py`` compare what must be equal on all ranks, by ``checksum.py``;
``buffers.py`` copies rank 0's buffers; ``replicas.py`` leaves out averaging where all ranks compute the same gradients.
Reduce: ``tensor_averager.py`` sends small gradients in one exchange, and ``overlap.py`` large ones while
the backward still runs; ``reduction/`` is the arithmetic. ``tensor_stores.py`` takes the averages over.
``autograd_grad.py`` serves ``torch.autograd.grad``.
"""
