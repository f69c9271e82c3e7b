"""``verify=True``: a run is rehearsed and compared with one process before it begins."""
