"""Ways to look at a run: ``report/`` and ``timeline/`` after it, ``tracking/`` (MLflow and others) and ``debugger/``
during it, ``doctor/`` before it.

Start with ``report/report.py``, ``timeline/timeline.py``, ``tracking/mlflow.py``, ``debugger/rank_debugger.py`` or
``doctor/visit.py``.
"""
