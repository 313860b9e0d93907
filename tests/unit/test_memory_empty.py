"""kvlink.empty: what it accepts, what it hands to NumPy and torch, and how long the memory lives."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import kvlink
from kvlink import errors, memory

NUMPY_DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"]
NUMPY_DTYPES += ["float64", "complex64", "complex128"]
TORCH_ONLY_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_takes_it_without_a_copy_by_either_protocol(dtype):
    buffer = kvlink.empty((2, 3, 5), dtype)
    views = [np.from_dlpack(buffer), np.asarray(buffer), np.asarray(memoryview(buffer)), buffer.numpy()]
    for view in views:
        assert view.dtype == np.dtype(dtype)
        assert view.shape == buffer.shape == (2, 3, 5)
        assert view.ctypes.data == buffer.address
        assert view.flags.writeable
        assert view.flags.c_contiguous
        assert not view.any()
    views[0][1, 2, 4] = 1
    assert all(view[1, 2, 4] == 1 for view in views)
    assert buffer.nbytes == views[0].nbytes


@pytest.mark.parametrize("dtype", [*NUMPY_DTYPES, *TORCH_ONLY_DTYPES])
def test_torch_takes_it_without_a_copy(dtype):
    torch = pytest.importorskip("torch", reason="the demo extra is not installed")
    buffer = kvlink.empty((4, 3), getattr(torch, dtype))
    assert buffer.dtype == dtype
    for tensor in (torch.from_dlpack(buffer), torch.utils.dlpack.from_dlpack(buffer.__dlpack__())):
        assert tensor.dtype == getattr(torch, dtype)
        assert tensor.shape == (4, 3)
        assert tensor.data_ptr() == buffer.address
    tensor.view(torch.uint8).fill_(1)
    assert set(bytes(memoryview(buffer).cast("B"))) == {1}


@pytest.mark.parametrize(("dtype", "as_numpy"), [("bfloat16", "uint16"), ("float8_e5m2", "uint8"), ("opaque20", "V20")])
def test_elements_unknown_to_numpy_are_opaque_there(dtype, as_numpy):
    buffer = kvlink.empty((4, 3), dtype)
    view = buffer.numpy()
    assert view.dtype == np.dtype(as_numpy)
    assert view.shape == (4, 3)
    assert view.ctypes.data == buffer.address
    assert view.nbytes == buffer.nbytes


def test_dtypes_are_taken_in_the_forms_that_people_have_them():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the test extra is not installed")
    forms = ["float32", np.float32, np.dtype("<f4")]
    assert {kvlink.empty(1, form).dtype for form in forms} == {"float32"}
    assert kvlink.empty(1, ml_dtypes.bfloat16).dtype == "bfloat16"
    assert kvlink.empty(1, np.dtype(ml_dtypes.float8_e4m3fn)).dtype == "float8_e4m3fn"
    assert kvlink.empty(1, bool).dtype == "bool"


def test_capsules_are_versioned_for_who_asks():
    buffer = kvlink.empty(4, "uint8")
    assert '"dltensor"' in repr(buffer.__dlpack__())
    assert '"dltensor_versioned"' in repr(buffer.__dlpack__(max_version=(1, 0)))
    assert '"dltensor"' in repr(buffer.__dlpack__(max_version=(0, 8), stream=None, dl_device=(1, 0), copy=False))
    assert buffer.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError):
        buffer.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        buffer.__dlpack__(dl_device=(2, 0))


@pytest.mark.parametrize(
    "shape", [0, (), (0,), (3, 0), (-1,), "12", "ab", None, 2.5, (1, "x"), (2**62, 8), 2**64, (2**40, 2**40)]
)
def test_a_shape_that_no_memory_has_is_refused(shape):
    with pytest.raises(errors.InvalidArgument):
        kvlink.empty(shape, "float32")


@pytest.mark.parametrize(
    "dtype", ["float31", "", "opaque0", "opaque", ">f4", np.dtype(">f4"), None, object(), "object"]
)
def test_a_dtype_that_is_none_is_refused(dtype):
    with pytest.raises(errors.InvalidArgument):
        kvlink.empty(4, dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:-1", "cuda:x", "cpu:0", "", None, 0])
def test_a_device_that_is_none_is_refused(device):
    with pytest.raises(errors.InvalidArgument):
        kvlink.empty(4, "float32", device=device)


def test_more_than_the_machine_has_is_out_of_memory():
    with pytest.raises(MemoryError, match="this machine has") as caught:
        kvlink.empty(2**45, "uint8")
    assert isinstance(caught.value, errors.OutOfMemory)


@pytest.mark.parametrize("view_of", [np.from_dlpack, np.asarray, memoryview, lambda buffer: buffer.__dlpack__()])
def test_a_view_keeps_the_memory_alive_and_the_last_one_frees_it(view_of):
    buffer = kvlink.empty(4096, "uint8")
    address, gone = buffer.address, weakref.ref(buffer)
    view = view_of(buffer)
    del buffer
    gc.collect()
    assert gone() is not None
    pool = memory.pool_of(address)
    assert pool is not None
    assert pool.nbytes == 4096
    del view, pool
    gc.collect()
    assert gone() is None
    assert memory.pool_of(address) is None


def test_a_slice_of_a_torch_view_keeps_the_memory_alive():
    torch = pytest.importorskip("torch", reason="the demo extra is not installed")
    buffer = kvlink.empty((8, 4096), "uint8")
    address = buffer.address
    part = torch.from_dlpack(buffer)[3]
    del buffer
    gc.collect()
    part.fill_(7)
    assert memory.pool_of(address) is not None
    del part
    gc.collect()
    assert memory.pool_of(address) is None


def test_a_buffer_says_what_it_is():
    assert repr(kvlink.empty((2, 3), "bfloat16")) == "kvlink.Buffer(shape=(2, 3), dtype='bfloat16', device='cpu')"
    assert kvlink.empty(5, "int8").shape == (5,)
