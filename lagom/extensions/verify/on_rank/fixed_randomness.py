"""``fixed_randomness``: makes random numbers equal in one process and on ranks, to compare everything else."""

from __future__ import annotations

import functools
import random
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lagom.patching.replace import replaced
from lagom.random_states import random_states, set_random_states
from lagom.run_state.random_streams import derive_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lagom.session.session import Session

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextmanager
def fixed_randomness(session: Session) -> Iterator[None]:
    """Switch dropout off, and seed the generators with a sample's index before its fetch; in loader workers too.

    Samples of iterable data sets, samples that a data set fetches together, and those of loaders without batches are
    not seeded.
    """
    seed = session.config.seed or 0
    attention = F.scaled_dot_product_attention

    def without_dropout(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    with ExitStack() as stack:
        for name in _DROPOUTS:
            stack.enter_context(replaced(F, name, _identity))
        stack.enter_context(replaced(F, "scaled_dot_product_attention", without_dropout))
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(replaced(kind, "forward", _without_dropout(kind)))
        stack.enter_context(replaced(_MapDatasetFetcher, "fetch", _fetching(seed)))
        yield


def _identity(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return input


def _without_dropout(kind: type[nn.RNNBase]) -> Any:
    """Return the forward of ``kind``, whose dropout is C++ code, with the module's dropout at 0 meanwhile."""
    original = vars(kind)["forward"]

    @functools.wraps(original)
    def forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
        with replaced(self, "dropout", 0.0):
            return original(self, *args, **kwargs)

    return forward


def _fetching(seed: int) -> Any:
    original = vars(_MapDatasetFetcher)["fetch"]

    def fetch(self: Any, index: Any) -> Any:
        # Samples that a data set fetches together cannot be seeded one by one; a Subset fetches them one by one anyway.
        if not self.auto_collation or (hasattr(self.dataset, "__getitems__") and type(self.dataset) is not Subset):
            return original(self, index)
        before = random_states()
        try:
            samples = [_drawn(self.dataset, one, seed) for one in index]
        finally:
            set_random_states(before)
        return self.collate_fn(samples)

    return fetch


def _drawn(dataset: Any, index: Any, seed: int) -> Any:
    start = derive_seed("pinned", seed, int(index) if isinstance(index, (int, torch.Tensor)) else repr(index))
    random.seed(start)
    torch.default_generator.manual_seed(start)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(start % 2**32)
    return dataset[index]
