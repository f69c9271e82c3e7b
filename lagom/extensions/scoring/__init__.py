"""Scoring: a trained model applied to tables, and saved for MLflow. It takes no part in a run.

Start with ``predictor.py``; ``row_scorer.py`` has a batch from the columns to the outputs, wherever it is scored;
``trained_model.py`` finds the model, ``model_inputs.py`` its columns. ``frame_scoring.py`` is for Spark,
``local_scoring.py`` for pandas, Arrow and Parquet, ``dataset_scoring.py`` for data sets, ``mlflow_model.py`` for
MLflow.
"""
