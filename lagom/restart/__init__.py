"""Runs that lost a rank begin again: what counts as a loss, and what the next attempt must know of the lost one."""
