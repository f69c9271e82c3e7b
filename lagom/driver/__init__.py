"""The driver's side of a run, which never imports torch: preparation, launch, attempts, display, aggregation.

Start with ``protocol.py`` (what a launcher does) and ``run.py`` (one attempt). ``lagom/spark`` has the launcher for
Spark.
"""
