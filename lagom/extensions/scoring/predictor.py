"""``Predictor``: applies a trained model to tables and data sets, and saves it as a model of MLflow."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lagom.errors import DataError
from lagom.launch import active_session
from lagom.settings import check_one_of, is_int

if TYPE_CHECKING:
    from lagom.extensions.scoring.model_inputs import Inputs
    from lagom.extensions.scoring.row_scorer import RowScorer

LAUNCHERS = ("auto", "spark", "local")


class Predictor:
    """A trained model that is applied to the rows of a table, which gets the model's outputs as further columns.

    The model is copied to the CPU and set to evaluation mode; later changes of the original have no effect. It runs
    without gradients, on an accelerator where there is one. Floats are converted to the type of the model's parameters.

    Args:
        model: a torch module, its ``state_dict``, the path of a file that ``torch.save`` wrote, a dict or tuple with
            one of these, or the result of a run that returned one.
        module: for a ``state_dict``, a function without arguments that makes the module as the training did; None: the
            module of the run's config, if it takes no arguments.
        entry: key of the model, if a dict or tuple has several.
        inputs: columns that become the model's arguments. A list is by position, ``["user", "item"]``, a dict by the
            names of forward's parameters, ``{"user": "user_id"}``. A list inside of it, ``[["age", "usage"]]``, is one
            tensor of shape ``(rows, 2)``, and so is a list that is longer than forward's parameters. None: columns that
            are called as forward's parameters are. With ``transform``, the columns that it may read; None: all.
        transform: makes the model's arguments of a batch: gets a dict from columns to tensors (texts and bytes: lists),
            and returns a tensor, a tuple of arguments, or a dict of arguments by name.
        postprocess: gets the model's output for a batch, and returns outputs: a tensor, a list of texts, or a tuple or
            dict of these.
        outputs: names of the outputs; None: "prediction" for one, those of a dict or dataclass, or "prediction_0" and
            so on. From a dict, the names also choose. A dict from names to types in Spark's spelling,
            ``{"score": "float"}``, also converts; it is needed for tables without rows.
        nulls: rows with a null in a column of the model: "error", "null" (their outputs are null), or a dict from
            columns to values in the place of nulls.
        key: columns that name a row in errors; none: those of the model.
        batch_size: rows of a call of the model; None: as many as have 8 MB, at most 4096.
        device: torch's name of a device; None: an accelerator where there is one, else the CPU.

    Raises:
        ValueError: for a wrong setting, if there is no model, or if a ``state_dict`` does not fit its module.
        DataError: if a file of weights cannot be read.
    """

    def __init__(
        self,
        model: Any,
        *,
        module: Callable[..., Any] | None = None,
        entry: str | int | None = None,
        inputs: Inputs = None,
        transform: Callable[[Any], Any] | None = None,
        postprocess: Callable[[Any], Any] | None = None,
        outputs: str | Sequence[str] | Mapping[str, str] | None = None,
        nulls: str | Mapping[str, Any] = "error",
        key: str | Sequence[str] = (),
        batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        from lagom.extensions.scoring.trained_model import trained_model

        _check(transform=transform, postprocess=postprocess, module=module)
        if not isinstance(nulls, Mapping):
            check_one_of("nulls", nulls, ("error", "null"))
        if nulls == "null" and transform is not None and inputs is None:
            raise ValueError("nulls='null' with transform= needs inputs=, the columns whose nulls count")
        if batch_size is not None and (not is_int(batch_size) or batch_size < 1):
            raise ValueError(f"batch_size is {batch_size!r}; want a number of rows, at least 1, or None")
        self._inputs = inputs
        self._transform = transform
        self._postprocess = postprocess
        self._names = None if outputs is None else (outputs,) if isinstance(outputs, str) else tuple(outputs)
        self._schema = _schema(outputs) if isinstance(outputs, Mapping) else None
        self._nulls = nulls
        self._key = (key,) if isinstance(key, str) else tuple(key)
        self._batch_size = batch_size
        self._device = device
        self._model = trained_model(model, module, entry)

    def predict(self, data: Any, *, to: str | os.PathLike[str] | None = None, launcher: str = "auto") -> Any:
        """Return ``data`` with the model's outputs as further columns; rows and their order are kept.

        Args:
            data: a DataFrame of Spark or pandas, or an Arrow table, which gives one of the same kind; a path or URL of
                Parquet files or a Delta table, or a ``ParquetDataset``, which gives an Arrow table, or with Spark a
                Spark DataFrame; or another data set of torch with a length, which gives a ``StackDataset`` with the
                items as "input" and the outputs.
            to: for a path, the Parquet file, or with Spark the folder, that is written instead of a table in memory;
                it is returned. It must not exist.
            launcher: for a path, what reads it: "spark", "local" (this process), or "auto": Spark if a session is
                active.

        Raises:
            ValueError: if the columns are not what the model takes, ``data`` is of another kind, or ``to`` exists.
            DataError: if rows cannot be scored; the text names the row. Spark raises its own errors when it computes
                the outputs, with the same text.
            PayloadError: if Spark cannot be sent the model or a function.
        """
        check_one_of("launcher", launcher, LAUNCHERS)
        from lagom.extensions.scoring.input_columns import ScoringError

        try:
            return self._predicted(data, to, launcher)
        except ScoringError as error:
            raise DataError(str(error)) from error.__cause__

    def _predicted(self, data: Any, to: str | os.PathLike[str] | None, launcher: str) -> Any:
        from lagom.extensions.scoring import local_scoring

        if isinstance(data, (str, os.PathLike)):
            return self._path_predicted(os.fspath(data), to, launcher)
        if to is not None:
            raise ValueError("to= is for a path of Parquet files; write what predict returns")
        kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(data).__mro__}
        if ("pyspark", "DataFrame") in kinds and hasattr(data, "sparkSession"):
            from lagom.extensions.scoring.frame_scoring import score_frame

            return score_frame(self.scorer, data)
        if ("pandas", "DataFrame") in kinds:
            return local_scoring.score_pandas(self.scorer, data)
        if ("pyarrow", "Table") in kinds or ("pyarrow", "RecordBatch") in kinds:
            return local_scoring.score_table(self.scorer, data)
        if ("lagom", "ParquetDataset") in kinds:
            return local_scoring.score_parquet(self.scorer, data.table, None)
        if ("torch", "Dataset") in kinds and hasattr(data, "__len__"):
            from lagom.extensions.scoring.dataset_scoring import score_dataset

            return score_dataset(self.items_scorer(), self._inputs, data)
        raise ValueError(f"cannot score a {type(data).__module__}.{type(data).__name__}; {_KINDS}")

    def _path_predicted(self, path: str, to: str | os.PathLike[str] | None, launcher: str) -> Any:
        from lagom.extensions.scoring import local_scoring

        session = active_session() if launcher == "auto" else None
        if launcher == "spark" or session is not None:
            from lagom.extensions.scoring.frame_scoring import score_path

            return score_path(self.scorer, path, to)
        return local_scoring.score_path(self.scorer, path, to)

    def save_mlflow(
        self, path: str | os.PathLike[str] | None = None, *, example: Any, name: str | None = None, **options: Any
    ) -> Any:
        """Save the model as one of MLflow's flavour pyfunc, which needs no lagom where it is loaded.

        ``mlflow.pyfunc.load_model`` and ``mlflow.pyfunc.spark_udf`` then give the outputs for a DataFrame of the
        columns of the model.

        Args:
            path: folder to write, which must not exist; None with ``name``.
            example: a DataFrame of pandas or Spark, or an Arrow table, with some rows: the types of its columns are
                part of the model.
            name: logs the model to MLflow's active run instead, under this name.
            options: further options of ``mlflow.pyfunc.save_model`` or ``log_model``, such as
                ``registered_model_name="churn"`` or ``pip_requirements=[...]``.

        Returns:
            What MLflow returns: None for a path, else the information about the logged model.

        Raises:
            ValueError: for both or none of ``path`` and ``name``, or an example that the model does not take.
            DataError: if the rows of the example cannot be scored.
            LagomError: if MLflow is not installed.
        """
        from lagom.extensions.scoring.input_columns import ScoringError
        from lagom.extensions.scoring.mlflow_model import save

        try:
            return save(self.scorer, path, name, example, options)
        except ScoringError as error:
            raise DataError(str(error)) from error.__cause__

    def scorer(
        self, names: Sequence[str], sample: Callable[[Sequence[str], Sequence[str], bool], Any], where: str = ""
    ) -> RowScorer:
        """Return the scorer for a table with the columns ``names``, with the types of its outputs.

        Args:
            sample: returns rows of the columns that it is given, as Arrow's table or batch: the first ones, or if its
                second argument names columns, preferably those that have no null in them. If its third argument is
                False, the types of the columns are enough.
            where: place of these rows, for errors.

        Raises:
            ValueError: if the columns are not what the model takes, or outputs are called as columns are.
            ScoringError: if the rows cannot be scored.
        """
        from lagom.accelerators import available_accelerator
        from lagom.extensions.scoring.model_inputs import check_types, model_inputs
        from lagom.extensions.scoring.row_scorer import RowScorer

        columns, arguments = model_inputs(self._inputs, self._transform, self._model.forward, names)
        fills = self._nulls if isinstance(self._nulls, Mapping) else {}
        for option, given in (("nulls", fills), ("key", self._key)):
            if missing := [name for name in given if name not in names]:
                raise ValueError(f"{option}= names the column {missing[0]!r}, which there is not")
        scorer = RowScorer(
            model=self._model,
            columns=columns,
            key=self._key,
            arguments=arguments,
            transform=self._transform,
            postprocess=self._postprocess,
            names=self._names,
            fills=fills,
            skips_nulls=self._nulls == "null",
            batch_size=self._batch_size,
            device=self._device,
            find_accelerator=available_accelerator,
            schema=self._schema,
        )
        read = list(dict.fromkeys([*columns, *self._key]))
        rows = sample(read, columns if scorer.skips_nulls else [], self._schema is None)
        check_types(columns, arguments, rows.schema)
        scorer.check_nulls(rows)
        if (batch := scorer.first_rows(rows)) is not None:
            described = scorer.describe(batch, where or "the rows without nulls" * scorer.skips_nulls)
            scorer.schema = self._schema if self._schema is not None else described
        if scorer.schema is None:
            raise ValueError(
                "the table has no rows that can be scored, and so the types of the outputs are not known; give them: "
                'outputs={"prediction": "float"}'
            )
        if twice := [name for name in scorer.schema.names if name in names]:
            raise ValueError(f"there is a column {twice[0]!r} already; give the outputs other names by outputs=")
        return scorer

    def items_scorer(self) -> RowScorer:
        """Return a scorer for the items of a data set."""
        from lagom.accelerators import available_accelerator
        from lagom.extensions.scoring.row_scorer import RowScorer

        return RowScorer(
            model=self._model,
            columns=(),
            transform=self._transform,
            postprocess=self._postprocess,
            names=self._names,
            batch_size=self._batch_size,
            device=self._device,
            find_accelerator=available_accelerator,
        )


_KINDS = (
    "want a DataFrame of Spark or pandas, an Arrow table, a path of Parquet files, or a data set of torch with a "
    "length (TensorDataset(x) for a tensor; loader.dataset for a DataLoader; frame.to_spark() for pyspark.pandas; "
    "frame.to_arrow() for polars)"
)


def _check(**functions: Any) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ValueError(f"{name}= is a {type(function).__name__}; want a function")


def _schema(outputs: Mapping[str, str]) -> Any:
    import pyarrow as pa

    from lagom.extensions.scoring.output_columns import arrow_type

    return pa.schema([pa.field(name, arrow_type(kind)) for name, kind in outputs.items()])
