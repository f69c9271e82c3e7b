"""ZeRO: what every rank would hold a copy of is shared out over the ranks."""
