"""BatchNorm: gathers the statistics of the whole batch over the ranks, and updates the running values."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn import functional as F
from torch.overrides import has_torch_function_unary

from lagom.errors import DivergenceError
from lagom.exchange.agreement_exchange import AgreedExchange, signature
from lagom.forward.batchnorm_arithmetic import (
    COMPLETE,
    COUNTED,
    ELEMENTS,
    MEANS,
    SAME,
    BatchNormCall,
    NormaliseFunction,
    local_moments,
    merge_moments,
    moments_of,
)
from lagom.patching.dynamo import remember_torch_functions
from lagom.patching.replace import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from torch import Tensor

    from lagom.forward.rows.recorder import BatchStatistics
    from lagom.run_state.loader_pass import BatchShare
    from lagom.session.session import Session

    Running: TypeAlias = tuple[Tensor | None, Tensor | None, float]


@contextmanager
def synchronise_batchnorm(session: Session) -> Iterator[None]:
    """Patch ``F.batch_norm``, which every BatchNorm layer calls, to use the statistics of the whole batch.

    See Note [BatchNorm] in batchnorm_arithmetic.py.

    TorchScript modules, and a ``batch_norm`` imported by name before the run, are out of reach.
    """
    remember_torch_functions()
    original = F.batch_norm
    eager = WholeBatchStatistics(session, original).batch_norm

    @torch._disable_dynamo  # in a frame that Dynamo cannot compile, it would compile the called functions
    def uncompiled(*args: Any) -> Tensor:
        return eager(*args)

    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)
        # A compiled module breaks its graph here: exchanges cannot be traced.
        return uncompiled(input, (running_mean, running_var, momentum), weight, bias, eps)

    with replaced(F, "batch_norm", batch_norm):
        yield


class WholeBatchStatistics:
    """Computes BatchNorm with statistics over all ranks."""

    def __init__(self, session: Session, original: Callable[..., Tensor]) -> None:
        assert session.group is not None
        self._original = original
        self._session = session
        self._group = session.group
        self._frame = AgreedExchange(self._group)
        self._signatures: dict[tuple[object, ...], bytes] = {}
        self._part: tuple[int, tuple[object, ...]] | None = None
        """Id of the share and identity of the layer, of the last call with less than the rank's share of a batch."""

    def batch_norm(
        self, input: Tensor, running: Running, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Run ``F.batch_norm(training=True)`` with statistics of the whole batch; update the running statistics.

        Without a share of a batch, or if the class of ``input`` has a ``__torch_function__`` of its own, the statistics
        are those of ``input``, as in torch.

        Args:
            running: running mean, running variance and momentum.

        Raises:
            ValueError: if the whole batch has one value per channel (on a GPU only if it is one sample).
            DivergenceError: on all ranks, unless all are at the same BatchNorm.
        """
        if self._session.forwards.probe_statistics is not None:
            return self._run_in_probe(self._session.forwards.probe_statistics, input, running, weight, bias, eps)
        share = self._session.share_in_forward
        if share is None or input.dim() < 2 or has_torch_function_unary(input):
            running_mean, running_var, momentum = running
            return self._original(input, running_mean, running_var, weight, bias, True, momentum, eps)
        number = self._session.tensors.leaves.known(weight) if weight is not None else None
        identity = (number, input.shape[1], input.dtype)
        if input.shape[0] < share.num_mine:
            if self._part == (id(share), identity):
                self._session.say_once(_UNEQUAL_PARTS)
            self._part = id(share), identity
        with torch.no_grad():
            merged = self._merge_statistics(input.detach(), share, ("forward", *identity))
            count, mean, var, one_process_count = moments_of(merged)
            _check_sizes(input, one_process_count, share)
            self._update_running_values(running, mean, var, one_process_count)
        kind = torch.promote_types(input.dtype, torch.float32)
        backward = partial(self.sum_in_place, identity=("backward", *identity))
        call = BatchNormCall(backward, eps, share.num_mine > 0, count)
        output: Tensor = NormaliseFunction.apply(input, weight, bias, mean.to(kind), var.to(kind), call)  # type: ignore[no-untyped-call]
        return output

    def _run_in_probe(
        self,
        probed: BatchStatistics,
        input: Tensor,
        running: Running,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        if probed.replays:
            mean, var = probed.next()
            return self._original(input, mean, var, weight, bias, False, 0.0, eps)
        running_mean, running_var, momentum = running
        if probed.is_noting:  # a TorchFunctionMode, as of MixedDevices, calls F.batch_norm again from within
            return self._original(input, running_mean, running_var, weight, bias, True, momentum, eps)
        with torch.no_grad():
            probed.noted.append(local_moments(input.detach()))
            probed.running += [buffer for buffer in (running_mean, running_var) if buffer is not None]
        probed.is_noting = True
        try:
            return self._original(input, running_mean, running_var, weight, bias, True, momentum, eps)
        finally:
            probed.is_noting = False

    def sum_in_place(self, values: Tensor, identity: tuple[object, ...]) -> None:
        """Sum float64 ``values`` over the ranks, in place.

        Raises:
            DivergenceError: on all ranks, unless all are at the same BatchNorm.
        """
        if not self._frame.sum(values, self._signature(identity)):
            self._raise_mismatch(*identity)

    def _signature(self, identity: tuple[object, ...]) -> bytes:
        signed = self._signatures.get(identity)
        if signed is None:
            signed = self._signatures[identity] = signature(repr(identity).encode())
        return signed

    def _raise_mismatch(self, direction: object, number: object, channels: object, _: object) -> NoReturn:
        layer = f"a BatchNorm of {channels} channels"
        if isinstance(number, int):
            layer += f" with {self._session.tensors.modules.name_of(self._session.tensors.leaves.tensor(number))}"
        assert self._session.backwards.divergence is not None
        self._session.backwards.divergence.find_divergence(f"the {direction} of {layer}")
        raise DivergenceError(f"other ranks ran another layer in place of {layer}")

    def _merge_statistics(self, input: Tensor, share: BatchShare, identity: tuple[object, ...]) -> Tensor:
        """Return the row of statistics of all ranks that ``merge_moments`` describes."""
        channels = input.shape[1]
        # On GPUs each rank fills its own row of zeros and the rows are summed: tensors of a GPU cannot travel with a
        # signature.
        num, place = (1, 0) if input.is_cpu else (self._group.world_size, self._group.rank)
        rows = torch.zeros(num, MEANS + 2 * channels, dtype=torch.float64, device=input.device)
        mine = rows[place]
        mine[SAME].fill_(1)
        count = input.numel() // channels if channels else 0
        if count:
            mean, var = local_moments(input)
            # Not by assignment: copying a number or a list to a GPU would wait for all its running work.
            mine[ELEMENTS].fill_(count)
            mine[COUNTED].fill_(count if share.num_mine else 0)
            mine[COMPLETE].fill_(input.shape[0] == max(share.num_mine, 1))
            mine[MEANS : MEANS + channels] = mean
            mine[MEANS + channels :] = var
        if mine.is_cpu:
            merged = self._frame.merge(mine, merge_moments, self._signature(identity))
            return merged if merged is not None else self._raise_mismatch(*identity)
        self.sum_in_place(rows, identity)
        return merge_moments(rows)

    def _update_running_values(self, running: Running, mean: Tensor, var: Tensor, count: Tensor) -> None:
        running_mean, running_var, momentum = running
        for buffer, new in ((running_mean, mean), (running_var, var * (count / (count - 1).clamp(min=1)))):
            if buffer is not None:
                self._session.tensors.synchronised_buffers[buffer] = None
                # Through .data: another forward's graph may hold the buffer, and torch's kernel does not raise its
                # version either.
                buffer.data.mul_(1 - momentum).add_((new * momentum).to(buffer.dtype))


_UNEQUAL_PARTS = (
    "a BatchNorm is called several times with parts of a batch (a ghost batch norm): with batches='split' these are "
    "parts of a rank's share, and its statistics those of one such part of each rank together, not those of a part in "
    "one process; batches='whole' makes them so"
)


def _check_sizes(input: Tensor, count: Tensor, share: BatchShare) -> None:
    alone = input.numel() == input.shape[1] and share.num_all == 1
    # On a GPU the count is not read: that would wait for all its running work. On a CPU it is not read by item(), which
    # a probe would record: a forward that reads numbers is sliced only while they stay the same.
    if alone or (count.device.type == "cpu" and count.detach().numpy() == 1):
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.size()}")
