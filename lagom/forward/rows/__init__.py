"""Forwards that are split by rows across ranks, where a probe has shown that each row is computed independently.

Start with ``slicer.py``. ``probe.py`` finds out which forwards may be split, with ``backward_probe.py`` for functions
that have a backward of their own. ``whole_reasons.py`` has all reasons why a forward is not split. ``whole_batch.py``
gathers the outputs, and ``row_losses.py`` splits the losses of large outputs. ``row_places.py`` turns tensors that have
their rows in another dimension, and ``one_hot.py`` avoids reads of classes. ``input_reads.py`` finds numbers that a
forward reads from its input, and ``inner_losses.py`` adds the losses that it computes. See Note [Probe] in
``probe.py``.
"""
