"""Spark: the launcher on the driver, and a run's processes on the executors.

Start with ``spark.py`` (the launcher), then ``spark_session.py`` (``map_tasks`` starts the job, as a barrier stage or
not), ``spark_task.py`` (a task) and ``spark_worker.py`` (a task in Spark's Python worker, with its barrier context).
The worker asks ``executor_server.py``, the fork server that all workers of an executor share, to fork
the task's host process (``task_host.py``). ``executor_survey.py`` reports the Python of a task and the hosts that it
reaches. ``decommissions.py`` tells a run of executors that are about to go. ``spark_state.py`` carries pyspark's
``TaskContext`` and files from the worker to the ranks.
"""
