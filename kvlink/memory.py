"""Memory that kvlink moves fastest: ``kvlink.empty`` and what it returns.

Host memory is a pool: a sealed memfd of its own, which another process of the host maps read-only and copies from
with no help of this one. GPU memory is one allocation of the CUDA driver, so that it can be shared as a whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from kvlink import _native
from kvlink.errors import InvalidArgument, NoGpu, OutOfMemory

if TYPE_CHECKING:
    import numpy

__all__ = ["Buffer", "DeviceBuffer", "SharedPool", "copied_bytes", "empty", "pool_of"]

_DLPACK_CPU = 1
_DLPACK_CUDA = 2


@dataclass(frozen=True, slots=True)
class _Element:
    """What the two export protocols call an element: DLPack by code, bits and lanes, the buffer protocol by format.

    Where the buffer protocol has no such type, the format is that of an unsigned integer of the same size.
    """

    code: int
    bits: int
    format: str
    lanes: int = 1

    @property
    def nbytes(self) -> int:
        return self.bits * self.lanes // 8


_ELEMENTS = {
    "bool": _Element(6, 8, "?"),
    "int8": _Element(0, 8, "b"),
    "int16": _Element(0, 16, "h"),
    "int32": _Element(0, 32, "i"),
    "int64": _Element(0, 64, "q"),
    "uint8": _Element(1, 8, "B"),
    "uint16": _Element(1, 16, "H"),
    "uint32": _Element(1, 32, "I"),
    "uint64": _Element(1, 64, "Q"),
    "float16": _Element(2, 16, "e"),
    "float32": _Element(2, 32, "f"),
    "float64": _Element(2, 64, "d"),
    "complex64": _Element(5, 64, "Zf"),
    "complex128": _Element(5, 128, "Zd"),
    "bfloat16": _Element(4, 16, "H"),
    "float8_e3m4": _Element(7, 8, "B"),
    "float8_e4m3": _Element(8, 8, "B"),
    "float8_e4m3b11fnuz": _Element(9, 8, "B"),
    "float8_e4m3fn": _Element(10, 8, "B"),
    "float8_e4m3fnuz": _Element(11, 8, "B"),
    "float8_e5m2": _Element(12, 8, "B"),
    "float8_e5m2fnuz": _Element(13, 8, "B"),
    "float8_e8m0fnu": _Element(14, 8, "B"),
}
_OPAQUE = re.compile(r"opaque([1-9]\d{0,3})")
_CUDA_DEVICE = re.compile(r"cuda(?::(\d{1,4}))?")


class SharedPool(Protocol):
    """One pool as a whole: what a peer maps, whatever part of it a tensor uses."""

    @property
    def address(self) -> int:
        """First byte, in this process."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the allocation."""
        ...

    def open_read_only(self) -> int:
        """Return a new descriptor that cannot be mapped writable; the caller closes it.

        Raises
        ------
        OutOfMemory
            If no descriptor is free.
        LaneUnavailable
            If the kernel can give no such promise.
        """
        ...


class Buffer(_native.PoolBuffer):
    """A zero-filled array in a host memory pool of its own. Made by ``kvlink.empty``.

    ``torch.from_dlpack``, ``numpy.from_dlpack``, ``numpy.asarray`` and ``memoryview`` all take it without a copy, and
    every view keeps the memory alive. The memory is freed with the last view and the last peer's mapping of it.
    """

    shape: tuple[int, ...]
    """Extent of each dimension; the array is packed in C order."""

    dtype: str
    """Tag of the elements, such as ``"bfloat16"``."""

    device = "cpu"
    """Where the memory lies."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        element = _element_of(dtype)
        super().__init__(list(shape), element_bytes=element.nbytes, format=element.format)
        self.shape = shape
        self.dtype = dtype
        self._element = element

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self._element.nbytes

    @property
    def address(self) -> int:
        """First byte, in this process."""
        return self.pool.address

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """Return a writable NumPy view.

        Elements that NumPy has no type for (bfloat16, float8) appear as unsigned integers of their size, and opaque
        ones as ``void``.
        """
        import numpy

        array = numpy.asarray(memoryview(self))
        return array.view(f"V{array.itemsize}") if array.dtype.kind == "S" else array

    if TYPE_CHECKING:  # the native base has the slot, which its stub cannot say

        def __buffer__(self, flags: int, /) -> memoryview: ...

    def __dlpack__(self, **request: Any) -> Any:
        """Return a capsule of the version that `request` asks for (DLPack 1.x or 0.x)."""
        return _dlpack(self, self._element, (_DLPACK_CPU, 0)).__dlpack__(**request)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_DLPACK_CPU, 0)

    def __repr__(self) -> str:
        return f"kvlink.Buffer(shape={self.shape}, dtype={self.dtype!r}, device='cpu')"


class DeviceBuffer:
    """A zero-filled array in memory of one GPU, in an allocation of its own. Made by ``kvlink.empty``.

    ``torch.from_dlpack`` and ``cupy.from_dlpack`` take it without a copy, and every view keeps the memory alive.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device_index: int) -> None:
        self._element = _element_of(dtype)
        self.shape = shape
        """Extent of each dimension; the array is packed in C order."""
        self.dtype = dtype
        """Tag of the elements, such as ``"bfloat16"``."""
        self.nbytes = math.prod(shape) * self._element.nbytes
        """Size in bytes."""
        self._device_index = device_index
        self._memory = _allocate_on_gpu(self.nbytes, device_index)

    @property
    def device(self) -> str:
        """Where the memory lies, such as ``"cuda:0"``."""
        return f"cuda:{self._device_index}"

    @property
    def address(self) -> int:
        """First byte, on the device."""
        return int(self._memory.ptr)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The array as CuPy and Numba take it; elements they have no type for appear as bytes."""
        formats = {"e": "<f2", "f": "<f4", "d": "<f8", "Zf": "<c8", "Zd": "<c16", "?": "|b1"}
        size = self._element.nbytes
        kind = "i" if self._element.format in "bhiq" else "u"
        typestr = formats.get(self._element.format, f"<{kind}{size}" if self._element.lanes == 1 else f"|V{size}")
        return {"shape": self.shape, "typestr": typestr, "data": (self.address, False), "version": 3, "strides": None}

    def __dlpack__(self, **request: Any) -> Any:
        """Return a capsule of the version that `request` asks for.

        No stream is waited for: nothing of kvlink's is in flight on this memory when a caller can see it.
        """
        return _dlpack(self, self._element, (_DLPACK_CUDA, self._device_index)).__dlpack__(**request)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_DLPACK_CUDA, self._device_index)

    def __repr__(self) -> str:
        return f"kvlink.DeviceBuffer(shape={self.shape}, dtype={self.dtype!r}, device={self.device!r})"


@overload
def empty(shape: int | Sequence[int], dtype: Any, device: Literal["cpu"] = "cpu") -> Buffer: ...
@overload
def empty(shape: int | Sequence[int], dtype: Any, device: str) -> Buffer | DeviceBuffer: ...
def empty(shape: int | Sequence[int], dtype: Any, device: str = "cpu") -> Buffer | DeviceBuffer:
    """Allocate zero-filled memory for a KV cache, in the way that peers of the same host read fastest.

    Parameters
    ----------
    shape
        Positive extents, or one.
    dtype
        A NumPy or torch dtype, or its name: the integers and floats, ``"bfloat16"``, the ``"float8_*"`` types, or
        ``"opaqueN"`` for elements of N bytes that kvlink moves without knowing them.
    device
        ``"cpu"``, or ``"cuda:0"`` and so on, which needs CuPy.

    Raises
    ------
    InvalidArgument
        If the shape, the dtype or the name of the device is none.
    OutOfMemory
        If memory, address space or file descriptors run out.
    NoGpu
        If a GPU is asked for and CuPy is missing, or finds no such device.
    """
    extents = _extents_of(shape)
    tag = _tag_of(dtype)
    if device == "cpu":
        return Buffer(extents, tag)
    cuda = _CUDA_DEVICE.fullmatch(device) if isinstance(device, str) else None
    if cuda is None:
        raise InvalidArgument(f"empty: device {device!r} is neither 'cpu' nor 'cuda:N'")
    return DeviceBuffer(extents, tag, int(cuda[1] or 0))


def pool_of(address: int) -> SharedPool | None:
    """Return the live pool that contains `address`, or ``None`` for memory that kvlink did not allocate."""
    return _native.pool_of(address)


def copied_bytes() -> int:
    """Return how many bytes the copy loops of this process have written since it started.

    A handoff on the ``mapped`` or ``vectored`` lane adds its own size once, on the target; on ``staged`` each side
    adds it once. More than that would be a hidden repack.
    """
    return _native.copied_bytes()


def _extents_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        extents = tuple(map(index, shape)) if isinstance(shape, Sequence) else (index(shape),)
    except TypeError:
        raise InvalidArgument(f"empty: shape {shape!r} is not a sequence of integers") from None
    if not extents or any(not 0 < n < 2**63 for n in extents):
        raise InvalidArgument(f"empty: shape {extents} must have positive extents")
    return extents


def _tag_of(dtype: Any) -> str:
    """Return the name of a NumPy, ml_dtypes or torch dtype, a scalar class, or a name."""
    if getattr(dtype, "byteorder", "=") == ">":
        raise InvalidArgument(f"empty: dtype {dtype!r} is big-endian; kvlink moves little-endian elements")
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", str(dtype))
    tag = str(name).removeprefix("torch.")
    _element_of(tag)
    return tag


def _element_of(tag: str) -> _Element:
    element = _ELEMENTS.get(tag)
    if element is not None:
        return element
    opaque = _OPAQUE.fullmatch(tag)
    if opaque is None:
        raise InvalidArgument(f"empty: dtype {tag!r} is none of {', '.join(_ELEMENTS)}, opaqueN")
    return _Element(1, 8, f"{opaque[1]}s", lanes=int(opaque[1]))


def _dlpack(buffer: Buffer | DeviceBuffer, element: _Element, device: tuple[int, int]) -> Any:
    return _native.dlpack_view(
        address=buffer.address,
        shape=list(buffer.shape),
        element=(element.code, element.bits),
        lanes=element.lanes,
        device=device,
        owner=buffer,
    )


def _allocate_on_gpu(nbytes: int, device_index: int) -> Any:
    """Return zeroed device memory by cudaMalloc: a slice of CuPy's pool could not be shared by itself."""
    try:
        import cupy
    except ImportError as error:
        raise NoGpu(f"empty: memory of cuda:{device_index} needs CuPy ({error}): pip install 'kvlink[cuda]'") from error
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise NoGpu(f"empty: cuda:{device_index} cannot be reached: {error}") from error
    if device_index >= count:
        raise NoGpu(f"empty: cuda:{device_index} does not exist: this process sees {count} GPUs")
    try:
        with cupy.cuda.Device(device_index):
            pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
            pointer.memset(0, nbytes)
            runtime.deviceSynchronize()  # the zeros must not land on what another stream writes next
    except (cupy.cuda.memory.OutOfMemoryError, runtime.CUDARuntimeError) as error:
        raise OutOfMemory(f"empty: {nbytes} bytes on cuda:{device_index}: {error}") from error
    return pointer
