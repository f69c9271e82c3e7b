"""What programs import as ``horovod.torch``: its public names, served over ``torch.distributed``."""

from __future__ import annotations

from typing import Any

from lagom.compat.horovod import elastic
from lagom.compat.horovod.asking import Adasum, Average, Max, Min, Product, Sum
from lagom.compat.horovod.autograd import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from lagom.compat.horovod.batchnorm import SyncBatchNorm
from lagom.compat.horovod.broadcasting import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from lagom.compat.horovod.compression import Compression
from lagom.compat.horovod.errors import HorovodInternalError
from lagom.compat.horovod.names import PATH
from lagom.compat.horovod.operations import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    barrier,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from lagom.compat.horovod.optimizer import DistributedOptimizer
from lagom.compat.horovod.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from lagom.compat.horovod.world import (
    cross_rank,
    cross_size,
    cuda_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_enabled,
    not_built,
    rank,
    shutdown,
    size,
)

ccl_built = ddl_built = mpi_built = nccl_built = rocm_built = not_built
mpi_threads_supported = mpi_enabled

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]

__path__ = [PATH]  # horovod.torch.compression and others are found below it
_NOT_SERVED = {
    "start_timeline": "set HOROVOD_TIMELINE=FILE before the run",
    "stop_timeline": "set HOROVOD_TIMELINE=FILE before the run",
}


def __getattr__(name: str) -> Any:
    what = f"; {_NOT_SERVED[name]}" if name in _NOT_SERVED else ""
    raise AttributeError(f"horovod.torch.{name} is not served by lagom{what}; docs/horovod.md lists what is")
