"""Searches and ablation studies: many trials of one training function, on the slots of a cluster."""
