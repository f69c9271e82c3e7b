"""``KeptMemory``: memory is used again once no tensor has it, and not before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lagom.run_state import kept_memory
from lagom.run_state.kept_memory import KeptMemory

SHAPE = (512, 1024)  # 2 MB of float32
HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda tensor: tensor[3],
    "an array": lambda tensor: tensor[3].numpy(),
    "the storage": lambda tensor: tensor.untyped_storage(),
    "the typed storage": lambda tensor: tensor.storage(),
    "data": lambda tensor: tensor.data,
    "a graph": lambda tensor: tensor.requires_grad_().square(),
    "a capsule": torch.utils.dlpack.to_dlpack,
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_is_used_again_once_a_tensor_and_all_that_share_its_memory_are_gone(holder: str) -> None:
    memory = KeptMemory()
    first = memory.empty(SHAPE, torch.float32)
    address, held = first.data_ptr(), HOLDERS[holder](first)
    del first
    assert memory.empty(SHAPE, torch.float32).data_ptr() != address
    del held
    again = [memory.empty(SHAPE, torch.float32) for _ in range(2)]
    assert address in [one.data_ptr() for one in again]


def test_memory_serves_tensors_of_any_type_and_shape() -> None:
    memory = KeptMemory()
    address = memory.empty(SHAPE, torch.float32).data_ptr()
    found = memory.empty((256, 1024), torch.float64)
    assert (found.data_ptr(), found.shape, found.dtype) == (address, (256, 1024), torch.float64)
    assert found.is_contiguous()


def test_a_tensor_has_no_memory_but_its_own() -> None:
    memory = KeptMemory()
    memory.empty(SHAPE, torch.float32)
    smaller = memory.empty((512, 1023), torch.float32)
    assert smaller.untyped_storage().nbytes() == smaller.nbytes


def test_the_storage_of_a_tensor_ends_with_it() -> None:
    memory = KeptMemory()
    tensor = memory.empty(SHAPE, torch.float32)
    address, storage = tensor.data_ptr(), weakref.ref(tensor.untyped_storage())
    del tensor
    assert storage() is None
    assert memory.empty(SHAPE, torch.float32).data_ptr() == address


def test_memory_that_is_sent_to_another_process_is_its_own() -> None:
    memory = KeptMemory()
    sent = memory.empty(SHAPE, torch.float32).fill_(1).share_memory_()
    memory.empty(SHAPE, torch.float32).fill_(2)
    assert sent.eq(1).all()


def test_a_limit_holds_for_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_memory, "_MAX_BYTES", 5 << 20)
    memory = KeptMemory()
    used = [memory.empty(SHAPE, torch.float32) for _ in range(4)]
    addresses = [one.data_ptr() for one in used]
    while used:
        del used[0]
    again = [memory.empty(SHAPE, torch.float32) for _ in range(2)]
    assert sorted(one.data_ptr() for one in again) == sorted(addresses[2:])


def test_threads_never_get_the_same_memory() -> None:
    memory = KeptMemory()
    shared: list[int] = []

    def use(number: int) -> None:
        for _ in range(300):
            tensor = memory.empty(SHAPE, torch.float32)
            tensor[0, 0] = number
            if tensor[0, 0] != number:
                shared.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not shared


def test_a_tensor_is_no_view_so_that_the_output_of_a_function_can_be_changed_in_place() -> None:
    assert not KeptMemory().empty(SHAPE, torch.float32)._is_view()
