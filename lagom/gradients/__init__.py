"""Gradients: collected in a backward, agreed upon, averaged over the ranks.

Start with ``backward.py`` (patches autograd), then ``gradient_averager.py`` (what one backward exchanges).

Collect: ``backward_gradients.py`` keeps a backward's gradients apart, that of a shared parameter once;
``accumulation.py`` joins several backwards, ``cached_backward.py`` recognizes repeated ones.
Agree: ``initial_values.py`` and ``divergence.py`` compare what must be equal on all ranks, by ``checksum.py``;
``buffers.py`` copies rank 0's buffers; ``replicas.py`` leaves out averaging where all ranks compute the same gradients.
Reduce: ``tensor_averager.py`` sends small gradients in one exchange, ``overlap.py`` and ``bucket_pipeline.py`` send
large ones while the backward goes on; ``reduction/`` is the arithmetic. ``gradient_store.py`` takes the averages over.
``grad_calls.py`` and ``autograd_grad.py`` serve ``torch.autograd.grad``; ``batched_roots.py`` splits its batched
calls. ``criteria.py`` finds losses that are not averaged exactly, and ``training_threads.py`` threads that train at
the same time.
"""
