"""Reading memory: numpy, torch, DLPack and buffers give the same geometry, and what cannot be a cache is refused."""

import array
import ctypes

import ml_dtypes
import numpy as np
import pytest

from kvlink.errors import InvalidArgument, UnsupportedMemory
from kvlink.layout.tensors import read_tensor


class OnlyDLPack:
    """Hides everything of an array but its DLPack exporter."""

    def __init__(self, wrapped, *, legacy):
        self.wrapped = wrapped
        self.legacy = legacy

    def __dlpack__(self, **options):
        if self.legacy and options:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.wrapped.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.wrapped.__dlpack_device__()


class OnCuda:
    """What cupy shows of an array, without a GPU."""

    def __init__(self, **interface):
        self.__cuda_array_interface__ = {"version": 3, "shape": (2, 3), "typestr": "<f2", **interface}


def test_numpy_strides_are_read_in_bytes():
    backing = np.zeros((4, 6, 8), np.float32)
    view = read_tensor("t", backing.transpose(2, 0, 1)[:, ::2])
    assert view.address == backing.ctypes.data
    assert view.shape == (8, 2, 6)
    assert view.strides == (4, 2 * 6 * 8 * 4, 8 * 4)
    assert view.nbytes == (8 - 1) * 4 + 2 * 6 * 8 * 4 + 5 * 32 + 4
    assert (view.dtype, view.element_bytes, view.kind) == ("float32", 4, "host")


@pytest.mark.parametrize("legacy", [False, True], ids=["versioned capsule", "legacy capsule"])
def test_dlpack_gives_what_the_buffer_gives(legacy):
    backing = np.arange(24, dtype=np.int16).reshape(2, 3, 4).transpose(0, 2, 1)
    through_dlpack = read_tensor("t", OnlyDLPack(backing, legacy=legacy))
    direct = read_tensor("t", backing)
    for field in ("address", "shape", "strides", "dtype", "element_bytes", "nbytes", "kind"):
        assert getattr(through_dlpack, field) == getattr(direct, field), field


def test_a_plain_buffer_is_enough():
    data = bytearray(24)
    view = read_tensor("t", memoryview(data).cast("B", (2, 3, 4)))
    assert view.shape == (2, 3, 4)
    assert view.address == ctypes.addressof(ctypes.c_char.from_buffer(data))
    assert read_tensor("t", array.array("d", [1.0, 2.0])).dtype == "float64"


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn], ids=["bfloat16", "fp8"])
def test_elements_that_numpy_does_not_know_keep_their_name(dtype):
    view = read_tensor("t", np.zeros((2, 3), dtype))
    assert view.dtype == np.dtype(dtype).name
    assert view.element_bytes == np.dtype(dtype).itemsize


def test_byte_order_is_part_of_the_dtype():
    assert read_tensor("t", np.zeros((2, 2), ">f4")).dtype != read_tensor("t", np.zeros((2, 2), "<f4")).dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_torch_tensors_are_read_without_numpy(dtype):
    torch = pytest.importorskip("torch", reason="torch is in the extra 'demo'")
    backing = torch.zeros(3, 4, 5, dtype=getattr(torch, dtype))
    view = read_tensor("t", backing.permute(2, 0, 1)[1:])
    size = backing.element_size()
    assert view.address == backing.data_ptr() + size
    assert view.strides == (size, 20 * size, 5 * size)
    assert (view.dtype, view.element_bytes) == (dtype, size)


def test_torch_tensors_without_strided_memory_are_refused():
    torch = pytest.importorskip("torch", reason="torch is in the extra 'demo'")
    with pytest.raises(UnsupportedMemory, match="device meta"):
        read_tensor("t", torch.zeros(2, 2, device="meta"))
    with pytest.raises(UnsupportedMemory, match="not strided"):
        read_tensor("t", torch.zeros(2, 2).to_sparse())


def test_memory_of_a_gpu_is_described_by_its_array_interface():
    view = read_tensor("t", OnCuda(data=(4096, False), strides=None))
    assert (view.kind, view.address, view.strides) == ("cuda", 4096, (6, 2))
    tagged = OnCuda(data=(4096, False), typestr="<u2")
    tagged.dtype, tagged.device = "bfloat16", "cuda:1"
    view = read_tensor("t", tagged)
    assert (view.dtype, view.element_bytes, view.device) == ("bfloat16", 2, 1)


def test_the_stride_of_an_axis_with_one_element_means_nothing():
    odd = np.lib.stride_tricks.as_strided(np.zeros(8, np.int8), shape=(1, 8), strides=(-77, 1))
    assert read_tensor("t", odd).strides == (0, 1)


def test_the_tensor_is_kept_alive():
    tensor = np.zeros((2, 2))
    assert read_tensor("t", tensor).owner is tensor


def read_only():
    tensor = np.zeros((2, 2))
    tensor.flags.writeable = False
    return tensor


@pytest.mark.parametrize(
    ("tensor", "error", "reason"),
    [
        (np.float32(1.0).reshape(()), InvalidArgument, "no dimensions|read-only"),
        (np.zeros(()), InvalidArgument, "no dimensions"),
        (np.zeros((2, 0)), InvalidArgument, r"empty: its shape is \(2, 0\)"),
        (np.zeros((4, 2))[::-1], InvalidArgument, "negative stride"),
        (read_only(), InvalidArgument, "read-only"),
        (OnlyDLPack(read_only(), legacy=False), InvalidArgument, "read-only"),
        (OnlyDLPack(read_only(), legacy=True), InvalidArgument, "read-?only|cannot be exported"),
        (OnCuda(data=(4096, True)), InvalidArgument, "read-only"),
        (b"bytes", InvalidArgument, "read-only"),
        ([[1.0]], UnsupportedMemory, "is a list"),
        (None, UnsupportedMemory, "is a NoneType"),
    ],
)
def test_memory_that_cannot_be_a_cache_is_refused(tensor, error, reason):
    with pytest.raises(error, match=reason):
        read_tensor("layers.7", tensor)


def test_a_refusal_names_the_tensor():
    with pytest.raises(InvalidArgument, match=r"layers\.7"):
        read_tensor("layers.7", read_only())
