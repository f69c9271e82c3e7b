"""``lagom.program.payload``: values go there and come back as they are, big ones without a copy."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import threading
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lagom.errors import PayloadError
from lagom.program.payload import Parcel, unpack, unpack_file
from lagom.program.signature import Call
from lagom.wire.framing import anonymous_file

ROOT = Path(__file__).parents[2]
BIG = 1 << 17  # elements, so more than is kept in the pickle itself


def there_and_back(value: Any) -> Any:
    return unpack(bytearray(Parcel(value).tobytes()))


def same_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


@pytest.mark.parametrize("length", [0, 1, 3, BIG])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.float8_e4m3fn,
    ],
)
def test_tensors_of_every_dtype_and_length_come_back_equal(dtype: torch.dtype, length: int) -> None:
    tensor = torch.randint(0, 2, (length,)).to(dtype)
    back = there_and_back(tensor)
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))
    if dtype is not torch.float8_e4m3fn:
        back.fill_(1)  # writable


@pytest.mark.parametrize("length", [4, BIG])
def test_tensors_that_share_memory_still_share_it(length: int) -> None:
    base = torch.arange(float(length))
    value = {"base": base, "view": base[1:], "other dtype": base.view(torch.int32), "again": base}
    back = there_and_back(value)
    assert back["again"] is back["base"]
    back["base"][1] = 7.0
    assert back["view"][0] == 7.0
    assert same_memory(back["base"], back["other dtype"])


def test_tensors_that_do_not_share_memory_do_not_begin_to() -> None:
    empty, other, some = there_and_back([torch.empty(0), torch.empty(0), torch.ones(BIG)])
    empty.resize_(2).fill_(1)
    other.resize_(2).fill_(2)
    assert empty.tolist() == [1, 1]
    assert some[0] == 1


@pytest.mark.parametrize("length", [4, 512])
def test_views_keep_their_strides(length: int) -> None:
    base = torch.arange(float(length * length)).reshape(length, length)
    for view in (base.t(), base[:, ::2], base[1:2].expand(length, length), base.as_strided((2, 2), (1, 1))):
        back = there_and_back(view)
        assert back.stride() == view.stride()
        assert torch.equal(back, view)


def test_a_small_view_of_a_large_tensor_is_right() -> None:
    assert there_and_back(torch.arange(float(BIG))[5:7]).tolist() == [5.0, 6.0]


def test_tied_parameters_stay_tied_and_are_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode = nn.Linear(300, 300)
            self.decode = nn.Linear(300, 300)
            self.decode.weight = self.encode.weight

    model = Tied()
    back = there_and_back(model)
    assert back.decode.weight is back.encode.weight
    assert type(back.encode.weight) is nn.Parameter
    assert back.encode.weight.requires_grad
    assert len(list(back.parameters())) == len(list(model.parameters()))


def test_the_flat_memory_of_a_recurrent_module_stays_flat() -> None:
    lstm = nn.LSTM(64, 64)
    back = there_and_back(lstm)
    x = torch.randn(3, 1, 64)
    assert torch.equal(back(x)[0], lstm(x)[0])


def test_a_model_with_its_optimizer_still_belongs_together() -> None:
    model = nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())
    back, back_optimizer = there_and_back((model, optimizer))
    assert back_optimizer.param_groups[0]["params"][0] is back.weight


def test_what_needs_gradients_still_does() -> None:
    assert there_and_back(torch.ones(3, requires_grad=True)).requires_grad
    assert there_and_back(torch.ones(BIG, requires_grad=True)).requires_grad
    assert not there_and_back(torch.ones(3)).requires_grad


def test_a_tensor_in_the_middle_of_a_graph_comes_back_without_the_graph() -> None:
    back = there_and_back(torch.ones(3, requires_grad=True) * 2)
    assert back.tolist() == [2.0, 2.0, 2.0]
    assert back.is_leaf


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_come_back() -> None:
    sparse = torch.eye(400).to_sparse()
    assert torch.equal(there_and_back(sparse).to_dense(), sparse.to_dense())
    rows = torch.eye(400).to_sparse_csr()
    assert torch.equal(there_and_back(rows).to_dense(), rows.to_dense())


class Named(torch.Tensor):
    """A subclass with an attribute, as libraries make them."""

    label: str


def test_tensor_subclasses_keep_class_and_attributes() -> None:
    tensor = torch.ones(BIG).as_subclass(Named)
    tensor.label = "mine"
    back = there_and_back(tensor)
    assert type(back) is Named
    assert back.label == "mine"
    assert back.sum() == BIG


def test_conjugates_devices_generators_and_meta_tensors_come_back() -> None:
    z = torch.complex(torch.ones(3), torch.ones(3)).conj()
    assert torch.equal(there_and_back(z), z)
    assert there_and_back(torch.empty(3, device="meta")).is_meta
    generator = torch.Generator().manual_seed(3)
    expected = torch.Generator().manual_seed(3)
    assert torch.equal(torch.rand(2, generator=there_and_back(generator)), torch.rand(2, generator=expected))


@pytest.mark.parametrize("length", [3, BIG])
def test_arrays_come_back_with_their_flags(length: int) -> None:
    array = np.arange(length)
    fixed = np.arange(length)
    fixed.flags.writeable = False
    back = there_and_back({"array": array, "fixed": fixed})
    assert back["array"].flags.writeable
    assert not back["fixed"].flags.writeable
    assert np.array_equal(back["array"], array)
    assert np.array_equal(back["fixed"], fixed)


def test_arrays_of_objects_of_records_of_columns_and_of_nothing_come_back() -> None:
    objects = np.array([{"a": 1}, None, "x"], dtype=object)
    assert there_and_back(objects).tolist() == objects.tolist()
    records = np.zeros(BIG, dtype=[("x", "f4"), ("y", "i8")])
    assert np.array_equal(there_and_back(records), records)
    columns = np.asfortranarray(np.arange(BIG * 2).reshape(2, BIG))
    assert there_and_back(columns).flags.f_contiguous
    assert np.array_equal(there_and_back(columns), columns)
    assert np.array_equal(there_and_back(columns[:, ::2]), columns[:, ::2])
    assert there_and_back(np.zeros((0, 3))).shape == (0, 3)
    assert there_and_back(np.array(3.5)).shape == ()


def test_an_array_in_a_torch_data_set_comes_back() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(float(BIG)), torch.ones(BIG))
    back = there_and_back(data)
    assert type(back) is torch.utils.data.TensorDataset
    assert back[5][0] == 5.0


@pytest.mark.parametrize(
    "value", [None, 0, "ü", b"x" * 100_000, bytearray(100_000), OrderedDict(a=1), {1: {2, 3}}, float("inf"), ...]
)
def test_plain_values_come_back_as_their_own_type(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_lambdas_closures_and_classes_from_nowhere_come_back() -> None:
    step = 3

    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

        def next(self) -> int:
            return self.x + step

    assert there_and_back(lambda x: x + step)(1) == 4
    assert there_and_back(Local(4)).next() == 7


def test_functions_keep_the_name_of_their_file() -> None:
    def outer() -> Any:
        return lambda: sys._getframe()

    found = there_and_back(outer)
    assert found is not outer
    assert [found.__code__.co_filename, found()().f_code.co_filename] == [__file__] * 2


def test_big_buffers_stay_out_of_the_pickle() -> None:
    tensor, array = torch.ones(1 << 20), np.ones(1 << 20)
    parcel = Parcel({"tensor": tensor, "array": array})
    pieces = [memoryview(piece) for piece in parcel.pieces()]
    sizes = sorted(piece.nbytes for piece in pieces)
    assert sizes[-2:] == [tensor.nbytes, array.nbytes]
    assert sum(sizes[:-2]) < 10_000
    # Not copies either: what is changed now is what will be written.
    tensor[0] = 7
    assert unpack(bytearray(parcel.tobytes()))["tensor"][0] == 7


def test_a_parcel_knows_its_size() -> None:
    for value in (None, np.ones(BIG), [torch.ones(BIG), np.ones(BIG + 1, dtype=np.uint8), "x"]):
        parcel = Parcel(value)
        assert parcel.size == len(parcel.tobytes())


def test_a_parcel_outlives_the_values_it_was_made_from() -> None:
    parcel = Parcel([torch.full((BIG,), float(i)) for i in range(20)])
    torch.full((BIG * 20,), -1.0)  # would take the freed memory
    assert [tensor[0].item() for tensor in unpack(bytearray(parcel.tobytes()))] == list(range(20))


class MadeWhenPickled:
    """Gives the pickler a tensor that nobody else keeps, as a lazy container would."""

    def __init__(self, fill: float) -> None:
        self.fill = fill

    def __reduce__(self) -> Any:
        return torch.Tensor.add, (torch.full((BIG,), self.fill), 0)


def test_tensors_that_live_only_while_they_are_pickled_are_not_mixed_up() -> None:
    back = there_and_back([MadeWhenPickled(float(i)) for i in range(20)])
    assert [tensor[0].item() for tensor in back] == list(range(20))


def file_of(value: Any) -> int:
    fd = anonymous_file("test")
    assert Parcel(value).write(fd) == os.fstat(fd).st_size
    return fd


def test_a_file_is_shared_but_what_is_written_stays_private() -> None:
    fd = file_of({"tensor": torch.zeros(BIG), "array": np.zeros(BIG)})
    one, two = unpack_file(fd), unpack_file(fd)
    os.close(fd)
    one["tensor"].fill_(1)
    one["array"][:] = 1
    assert two["tensor"].sum() == 0
    assert two["array"].sum() == 0


def test_reading_a_large_file_adds_next_to_no_memory() -> None:
    fd = file_of(torch.zeros(100 << 20, dtype=torch.uint8))
    before = _anonymous_kb()
    back = unpack_file(fd)
    os.close(fd)
    assert back.view(torch.int64).sum() == 0
    assert _anonymous_kb() - before < 20 << 10


def _anonymous_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_making_a_parcel_of_large_data_adds_next_to_no_memory() -> None:
    data = torch.ones(100 << 20, dtype=torch.uint8)
    before = _anonymous_kb()
    parcel = Parcel({"data": data})
    assert _anonymous_kb() - before < 10 << 10
    assert parcel.size > data.nbytes


def test_the_part_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def train() -> bool:
        return lock.locked()

    with pytest.raises(PayloadError) as raised:
        Parcel({"function": train})
    assert "'lock' that train() uses" in str(raised.value)
    with pytest.raises(PayloadError, match=r"hparams\['pool'\]\[1\] \(a lock\)"):
        Parcel({"hparams": {"lr": 1, "pool": [1, lock]}})
    assert raised.value.__cause__ is not None


def test_the_attribute_that_cannot_be_pickled_is_named() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(1))
    data.connection = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(PayloadError, match=r"train_set\.connection"):
        Parcel({"train_set": data})


def test_parts_of_variables_methods_partials_and_what_a_config_provides_are_named() -> None:
    class Box:
        def __init__(self) -> None:
            self.inner = {"lock": threading.Lock()}

        def fit(self) -> Any:
            return self.inner

    box = Box()

    def train(extra: Any = None) -> Any:
        return box

    for function, said in (
        (
            train,
            r"^the variable 'box\.inner\['lock'\]' that train\(\) uses \(a lock\) .*; make it where it is used",
        ),
        (box.fit, r"^the variable 'self\.inner\['lock'\]' that fit\(\) uses \(a lock\) "),
        (functools.partial(repr, box), r"^function\(0\)\.inner\['lock'\] \(a lock\) "),
    ):
        with pytest.raises(PayloadError, match=said):
            Parcel(Call(function=function, provided={"hparams": {}}))
    with pytest.raises(PayloadError, match=r"^hparams\['box'\]\.inner\['lock'\] \(a lock\) cannot be pickled: "):
        Parcel(Call(function=abs, provided={"hparams": {"box": box}}))


def test_a_field_of_a_dataclass_with_slots_is_named() -> None:
    @dataclasses.dataclass(slots=True)
    class Settings:
        lock: Any

    with pytest.raises(PayloadError, match=r"^hparams\.lock \(a lock\) cannot be pickled: "):
        Parcel(Call(function=abs, provided={"hparams": Settings(threading.Lock())}))


@pytest.mark.parametrize("kind", ["DataFrame", "Broadcast"])
def test_what_only_sparks_driver_has_is_named_without_its_insides(kind: str) -> None:
    class Anything:
        def __init__(self) -> None:
            self.inner = threading.Lock() if kind == "DataFrame" else 3

    Anything.__name__ = Anything.__qualname__ = kind
    Anything.__module__ = "pyspark.core"
    frame = Anything()
    with pytest.raises(
        PayloadError, match=rf"the variable 'frame' that <lambda>\(\) uses \(a {kind} of Spark's, .*"
    ) as raised:
        Parcel(Call(function=lambda: frame, provided={}))
    assert "or collect what is needed before the call" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_ring_that_cannot_be_pickled_is_named_without_going_round_for_ever() -> None:
    ring: list[Any] = [threading.Lock()]
    ring.insert(0, ring)
    with pytest.raises(PayloadError, match="lock"):
        Parcel({"ring": ring})


def test_an_open_file_is_named() -> None:
    with open(os.devnull, "w") as file, pytest.raises(PayloadError, match="log"):
        Parcel({"hparams": {"log": file}})


@pytest.mark.parametrize("length", [0, 3, 8, 12, 16, 30, 64, 100, 1000, -1])
def test_a_parcel_that_was_cut_off_is_refused_as_such(length: int) -> None:
    whole = Parcel({"a": torch.ones(BIG)}).tobytes()
    with pytest.raises(PayloadError):
        unpack(whole[: len(whole) - 100 if length == -1 else length])


@pytest.mark.parametrize(
    "data", [b"", b"PK\x03\x04" * 100, b"lagom\x004\n" + b"x" * 100, b"lagom\x005\n" + b"\xff" * 100]
)
def test_bytes_of_somebody_else_are_refused(data: bytes) -> None:
    with pytest.raises(PayloadError):
        unpack(data)


def test_an_empty_file_is_refused() -> None:
    fd = anonymous_file("test")
    with pytest.raises(PayloadError):
        unpack_file(fd)
    os.close(fd)


def test_a_function_that_sets_how_cudnn_works_can_travel() -> None:
    def train() -> bool:
        torch.backends.cudnn.benchmark = True
        return torch.backends.cudnn.benchmark

    source = train.__code__
    scope = {"torch": torch, "__name__": "__main__"}
    function = unpack(bytearray(Parcel(types.FunctionType(source, scope)).tobytes()))
    before = torch.backends.cudnn.benchmark
    try:
        assert function()
    finally:
        torch.backends.cudnn.benchmark = before


def test_a_cached_function_of_main_travels_with_what_it_calls() -> None:
    text = """
import functools

@functools.lru_cache(maxsize=7)
def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)

def train():
    return factorial(5), factorial.cache_parameters()["maxsize"], factorial.cache_info().hits, factorial(5)
"""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(text, scope)
    function = unpack(bytearray(Parcel(scope["train"]).tobytes()))
    assert function() == (120, 7, 0, 120)
    cached = function.__globals__["factorial"]
    assert cached.__wrapped__.__globals__["factorial"] is cached
    assert cached.cache_info().hits == 1
    assert unpack(bytearray(Parcel(functools.cache).tobytes())) is functools.cache
