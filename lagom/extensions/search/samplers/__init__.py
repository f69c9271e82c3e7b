"""Samplers, pruners and distributions of Optuna for a search."""
