"""Public names of the extension ``compat``: ``import lagom.compat.horovod``, ``maggy`` or ``petastorm``."""
