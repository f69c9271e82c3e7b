"""A Spark executor's part in a run.

Start with ``spark_worker.py`` (a task in Spark's Python worker). It has ``executor_server.py``, the fork server that
all workers of an executor share, fork the task's host process (``task_host.py``). ``executor_survey.py`` reports what
a task finds around it. ``spark_state.py`` carries what pyspark tells a program from the worker to the ranks.
"""
