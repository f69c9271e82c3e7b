"""Slots of a search: where its trials run."""
