"""``verify=True``: rehearses a run, and compares it with one process, before it begins."""
