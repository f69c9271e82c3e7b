"""``score_dataset``: applies a model to the items of a data set of torch, which stays as it is beside the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lagom.extensions.scoring.input_columns import ScoringError
from lagom.extensions.scoring.model_inputs import Inputs, forward_parameters, model_inputs
from lagom.extensions.scoring.output_columns import named_outputs
from lagom.extensions.scoring.row_scorer import RowScorer

INPUT = "input"
_BATCH_SIZE = 256


def score_dataset(scorer: RowScorer, inputs: Inputs, data: Any) -> Any:
    """Return a ``StackDataset`` of the items of ``data``, as "input", and the outputs.

    A transform gets a batch as torch's default collate function makes it. Without one, items are a tensor, a dict of
    which ``inputs`` or forward's parameters choose, or a tuple whose first parts are the model's arguments.

    Raises:
        ValueError: if the items are not what the model takes, or there are none.
        ScoringError: if an item cannot be scored; the text names it.
    """
    import torch
    from torch.utils.data import DataLoader, StackDataset

    if not len(data):
        raise ValueError("the data set has no items, and so the types of the outputs are not known")
    size = scorer.batch_size or _BATCH_SIZE
    rows: list[dict[str, Any]] = []
    for number, batch in enumerate(DataLoader(data, batch_size=size)):
        if not rows and scorer.transform is None and isinstance(batch, Mapping):
            _, scorer.arguments = model_inputs(inputs, None, scorer.model.forward, list(batch))
        first = number * size
        num_rows = min(size, len(data) - first)
        try:
            output = scorer.call(*_arguments(scorer, inputs, batch))
        except (ScoringError, ValueError):
            raise
        except Exception as error:
            raise ScoringError(_explained(scorer, inputs, data, first, num_rows, error)) from error
        rows.append(named_outputs(output, scorer.names, num_rows))
    columns: dict[str, Any] = {
        name: torch.cat([part[name] for part in rows])
        if isinstance(value, torch.Tensor)
        else [text for part in rows for text in part[name]]
        for name, value in rows[0].items()
    }
    if INPUT in columns:
        raise ValueError(f"an output is called {INPUT!r}, as the items are; give it another name by outputs=")
    return StackDataset(**{INPUT: data}, **columns)


def _arguments(scorer: RowScorer, inputs: Inputs, batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if scorer.transform is not None or isinstance(batch, Mapping):
        return scorer.arguments_of(batch)
    if inputs is not None:
        raise ValueError(f"inputs= names columns, and the items are of {type(batch).__name__}; give transform= instead")
    if not isinstance(batch, (list, tuple)):
        return [batch], {}
    parameters = forward_parameters(scorer.model.forward) or []
    needed = sum(each.default is each.empty and each.kind != each.KEYWORD_ONLY for each in parameters)
    if len(batch) < max(1, needed):
        raise ValueError(f"the items have {len(batch)} parts, and the model's forward takes {needed}; give transform=")
    return list(batch)[: max(1, needed)], {}


def _explained(scorer: RowScorer, inputs: Inputs, data: Any, first: int, num_rows: int, error: Exception) -> str:
    """Return a text about an ``error`` of the program's code, with the first item that fails alone."""
    from torch.utils.data import default_collate

    why = f"{type(error).__name__}: {error}"

    def fails(index: int) -> bool:
        try:
            scorer.call(*_arguments(scorer, inputs, default_collate([data[index]])))
        except Exception:  # the program's code; only the place is wanted
            return True
        return False

    index = next(filter(fails, range(first, first + num_rows)), None)
    if index is not None:
        return f"the model fails for item {index}: {why}"
    return f"the model fails for the batch of items {first} to {first + num_rows - 1}, and for none alone: {why}"
