"""The host process of a search's slot, which runs one trial after another. Start with ``trial_host.py``."""
