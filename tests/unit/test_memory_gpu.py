"""GPU memory of kvlink.empty: what is said where there is none, and what is asked of CuPy where there is."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

import kvlink
from kvlink import errors


class FakeCudaError(RuntimeError):
    """What CuPy raises for a failed call of the CUDA runtime."""


class FakeCupy(ModuleType):
    """The part of CuPy that kvlink.empty uses, over host memory."""

    def __init__(self, *, devices: int, free_bytes: int = 1 << 20) -> None:
        super().__init__("cupy")
        self.calls: list[object] = []
        cuda_memory = SimpleNamespace(OutOfMemoryError=MemoryError)

        def device_count() -> int:
            if devices == 0:
                raise FakeCudaError("cudaErrorNoDevice: no CUDA-capable device is detected")
            return devices

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                fake.calls.append(("device", self.index))

            def __exit__(self, *_: object) -> None:
                fake.calls.append("left")

        class Memory:
            def __init__(self, nbytes: int) -> None:
                if nbytes > free_bytes:
                    raise MemoryError("out of device memory")
                self.storage = kvlink.empty(nbytes, "uint8")

        class MemoryPointer:
            def __init__(self, mem: Memory, offset: int) -> None:
                self.mem, self.ptr = mem, mem.storage.address + offset

            def memset(self, value: int, nbytes: int) -> None:
                fake.calls.append(("memset", value, nbytes))

        fake = self
        runtime = SimpleNamespace(
            getDeviceCount=device_count,
            CUDARuntimeError=FakeCudaError,
            deviceSynchronize=lambda: fake.calls.append("synchronized"),
        )
        self.cuda = SimpleNamespace(
            runtime=runtime, memory=cuda_memory, Device=Device, Memory=Memory, MemoryPointer=MemoryPointer
        )


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(errors.NoGpu, match=r"cuda:0.*pip install 'kvlink\[cuda\]'"):
        kvlink.empty((2, 3), "float16", device="cuda:0")


def test_without_a_gpu_the_error_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(devices=0))
    with pytest.raises(errors.NoGpu, match="no CUDA-capable device"):
        kvlink.empty((2, 3), "float16", device="cuda")


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(devices=2))
    with pytest.raises(errors.NoGpu, match="cuda:2 does not exist.*2 GPUs"):
        kvlink.empty((2, 3), "float16", device="cuda:2")


def test_a_full_gpu_is_out_of_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(devices=1, free_bytes=10))
    with pytest.raises(errors.OutOfMemory, match="12 bytes on cuda:0"):
        kvlink.empty((2, 3), "float16", device="cuda:0")


def test_the_memory_is_zeroed_on_its_own_device_before_anyone_sees_it(monkeypatch: pytest.MonkeyPatch):
    cupy = FakeCupy(devices=2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    buffer = kvlink.empty((2, 3), "bfloat16", device="cuda:1")
    assert cupy.calls == [("device", 1), ("memset", 0, 12), "synchronized", "left"]
    assert buffer.device == "cuda:1"
    assert buffer.nbytes == 12
    assert buffer.__dlpack_device__() == (2, 1)
    assert '"dltensor_versioned"' in repr(buffer.__dlpack__(max_version=(1, 0)))
    interface = buffer.__cuda_array_interface__
    assert interface["data"] == (buffer.address, False)
    assert (interface["shape"], interface["typestr"]) == ((2, 3), "<u2")


@pytest.mark.parametrize(
    ("dtype", "typestr"),
    [("float16", "<f2"), ("bool", "|b1"), ("int32", "<i4"), ("complex64", "<c8"), ("float8_e5m2", "<u1")],
)
def test_the_cuda_array_interface_names_what_it_can(monkeypatch: pytest.MonkeyPatch, dtype: str, typestr: str):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy(devices=1))
    assert kvlink.empty(4, dtype, device="cuda:0").__cuda_array_interface__["typestr"] == typestr
