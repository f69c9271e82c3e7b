"""A trial as its ranks see it: its call, and what it reports while it runs."""
