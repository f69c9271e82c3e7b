"""``lagom doctor``: whether runs can be expected to work here, and what to do where not."""
