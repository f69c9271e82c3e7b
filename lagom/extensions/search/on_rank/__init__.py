"""A trial on its ranks: the call that the trial makes, and the values that it reports while it runs."""
