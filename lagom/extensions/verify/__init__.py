"""``verify=True``: rehearses a run before it begins, and compares the rehearsal with one process."""
