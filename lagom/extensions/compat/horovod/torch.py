"""The public names of ``horovod.torch``, served over ``torch.distributed``."""

from __future__ import annotations

from typing import Any

from lagom.extensions.compat.horovod import elastic as elastic
from lagom.extensions.compat.horovod.asynchronous import Adasum as Adasum
from lagom.extensions.compat.horovod.asynchronous import Average as Average
from lagom.extensions.compat.horovod.asynchronous import Max as Max
from lagom.extensions.compat.horovod.asynchronous import Min as Min
from lagom.extensions.compat.horovod.asynchronous import Product as Product
from lagom.extensions.compat.horovod.asynchronous import Sum as Sum
from lagom.extensions.compat.horovod.asynchronous import allgather_async as allgather_async
from lagom.extensions.compat.horovod.asynchronous import allreduce_async as allreduce_async
from lagom.extensions.compat.horovod.asynchronous import allreduce_async_ as allreduce_async_
from lagom.extensions.compat.horovod.asynchronous import alltoall_async as alltoall_async
from lagom.extensions.compat.horovod.asynchronous import barrier as barrier
from lagom.extensions.compat.horovod.asynchronous import broadcast_async as broadcast_async
from lagom.extensions.compat.horovod.asynchronous import broadcast_async_ as broadcast_async_
from lagom.extensions.compat.horovod.asynchronous import grouped_allgather_async as grouped_allgather_async
from lagom.extensions.compat.horovod.asynchronous import grouped_allreduce_async as grouped_allreduce_async
from lagom.extensions.compat.horovod.asynchronous import grouped_allreduce_async_ as grouped_allreduce_async_
from lagom.extensions.compat.horovod.asynchronous import grouped_reducescatter_async as grouped_reducescatter_async
from lagom.extensions.compat.horovod.asynchronous import join as join
from lagom.extensions.compat.horovod.asynchronous import poll as poll
from lagom.extensions.compat.horovod.asynchronous import reducescatter_async as reducescatter_async
from lagom.extensions.compat.horovod.asynchronous import sparse_allreduce_async as sparse_allreduce_async
from lagom.extensions.compat.horovod.asynchronous import synchronize as synchronize
from lagom.extensions.compat.horovod.broadcasting import allgather_object as allgather_object
from lagom.extensions.compat.horovod.broadcasting import broadcast_object as broadcast_object
from lagom.extensions.compat.horovod.broadcasting import broadcast_optimizer_state as broadcast_optimizer_state
from lagom.extensions.compat.horovod.broadcasting import broadcast_parameters as broadcast_parameters
from lagom.extensions.compat.horovod.compression import Compression as Compression
from lagom.extensions.compat.horovod.differentiable import allgather as allgather
from lagom.extensions.compat.horovod.differentiable import allreduce as allreduce
from lagom.extensions.compat.horovod.differentiable import allreduce_ as allreduce_
from lagom.extensions.compat.horovod.differentiable import alltoall as alltoall
from lagom.extensions.compat.horovod.differentiable import broadcast as broadcast
from lagom.extensions.compat.horovod.differentiable import broadcast_ as broadcast_
from lagom.extensions.compat.horovod.differentiable import grouped_allgather as grouped_allgather
from lagom.extensions.compat.horovod.differentiable import grouped_allreduce as grouped_allreduce
from lagom.extensions.compat.horovod.differentiable import grouped_allreduce_ as grouped_allreduce_
from lagom.extensions.compat.horovod.differentiable import grouped_reducescatter as grouped_reducescatter
from lagom.extensions.compat.horovod.differentiable import reducescatter as reducescatter
from lagom.extensions.compat.horovod.distributed_optimizer import DistributedOptimizer as DistributedOptimizer
from lagom.extensions.compat.horovod.exceptions import HorovodInternalError as HorovodInternalError
from lagom.extensions.compat.horovod.process_sets import ProcessSet as ProcessSet
from lagom.extensions.compat.horovod.process_sets import add_process_set as add_process_set
from lagom.extensions.compat.horovod.process_sets import global_process_set as global_process_set
from lagom.extensions.compat.horovod.process_sets import init as init
from lagom.extensions.compat.horovod.process_sets import remove_process_set as remove_process_set
from lagom.extensions.compat.horovod.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from lagom.extensions.compat.horovod.topology import cross_rank as cross_rank
from lagom.extensions.compat.horovod.topology import cross_size as cross_size
from lagom.extensions.compat.horovod.topology import cuda_built as cuda_built
from lagom.extensions.compat.horovod.topology import is_available, is_unavailable
from lagom.extensions.compat.horovod.topology import is_homogeneous as is_homogeneous
from lagom.extensions.compat.horovod.topology import is_initialized as is_initialized
from lagom.extensions.compat.horovod.topology import local_rank as local_rank
from lagom.extensions.compat.horovod.topology import local_size as local_size
from lagom.extensions.compat.horovod.topology import rank as rank
from lagom.extensions.compat.horovod.topology import shutdown as shutdown
from lagom.extensions.compat.horovod.topology import size as size

gloo_built = gloo_enabled = is_available
ccl_built = ddl_built = mpi_built = nccl_built = rocm_built = is_unavailable
mpi_enabled = mpi_threads_supported = is_unavailable

# A ``__path__``, though empty, makes this module a package, so that ``import horovod.torch.compression`` works.
__path__: list[str] = []
_INSTEAD_OF_TIMELINE = "; set HOROVOD_TIMELINE=FILE before the run"


def __getattr__(name: str) -> Any:
    instead = _INSTEAD_OF_TIMELINE if name in ("start_timeline", "stop_timeline") else ""
    raise AttributeError(f"horovod.torch.{name} is not served by lagom{instead}; docs/horovod.md lists what is")
