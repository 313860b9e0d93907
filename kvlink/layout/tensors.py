"""Reading where a tensor lies, whatever library it comes from, without importing that library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvlink.errors import InvalidArgument, UnsupportedMemory
from kvlink.layout import dlpack

__all__ = ["TensorView", "read_tensor"]

MemoryKind = Literal["host", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """Geometry of one tensor. Strides are in bytes, and 0 on an axis with one element.

    ``owner`` is the tensor itself: whoever uses the address keeps it.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    dtype: str
    kind: MemoryKind
    device: int
    owner: object

    @property
    def nbytes(self) -> int:
        """Distance from the first to one past the last byte."""
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.element_bytes


def read_tensor(name: str, tensor: Any) -> TensorView:
    """Return the geometry of `tensor`, which messages call `name`.

    Takes tensors of torch, arrays of numpy and cupy, and whatever exports ``__cuda_array_interface__``, DLPack or
    a buffer.

    Raises
    ------
    InvalidArgument
        If it is read-only, empty, without dimensions, or has a negative stride.
    UnsupportedMemory
        If it gives no access to its memory, or lies on a device other than the CPU and CUDA GPUs.
    """
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "stride"):
        view = _read_torch(name, tensor)
    elif hasattr(tensor, "__cuda_array_interface__"):
        view = _read_array_interface(name, tensor, tensor.__cuda_array_interface__, kind="cuda")
    elif hasattr(tensor, "__array_interface__"):
        view = _read_array_interface(name, tensor, tensor.__array_interface__, kind="host")
    elif hasattr(tensor, "__dlpack__"):
        view = _read_dlpack(name, tensor)
    else:
        view = _read_buffer(name, tensor)
    if not view.shape:
        raise InvalidArgument(f"tensor {name} has no dimensions")
    if 0 in view.shape:
        raise InvalidArgument(f"tensor {name} is empty: its shape is {view.shape}")
    if min(view.strides) < 0:
        raise InvalidArgument(f"tensor {name} has a negative stride: {view.strides} bytes")
    return view


def _packed_strides(shape: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    strides = [element_bytes] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def _refuse_read_only(name: str) -> None:
    raise InvalidArgument(f"tensor {name} is read-only: a node must be able to write its blocks")


def _view(
    tensor: object,
    *,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    element_bytes: int,
    dtype: str,
    kind: MemoryKind = "host",
    device: int = 0,
) -> TensorView:
    # The stride of an axis with one element means nothing, and libraries put anything there.
    strides = tuple(s if n > 1 else 0 for n, s in zip(shape, strides, strict=True))
    return TensorView(
        address=address,
        shape=shape,
        strides=strides,
        element_bytes=element_bytes,
        dtype=dtype,
        kind=kind,
        device=device,
        owner=tensor,
    )


def _read_torch(name: str, tensor: Any) -> TensorView:
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedMemory(f"tensor {name} is on device {device}: kvlink moves memory of cpu and cuda devices")
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        raise UnsupportedMemory(f"tensor {name} is not strided: its layout is {tensor.layout}")
    size = int(tensor.element_size())
    return _view(
        tensor,
        address=int(tensor.data_ptr()),
        shape=tuple(int(n) for n in tensor.shape),
        strides=tuple(int(s) * size for s in tensor.stride()),
        element_bytes=size,
        dtype=str(tensor.dtype).removeprefix("torch."),
        kind="cuda" if device.type == "cuda" else "host",
        device=int(device.index or 0),
    )


def _read_array_interface(name: str, array: Any, interface: dict[str, Any], *, kind: MemoryKind) -> TensorView:
    address, read_only = interface["data"]
    if read_only:
        _refuse_read_only(name)
    typestr = str(interface["typestr"])
    shape = tuple(int(n) for n in interface["shape"])
    size = int(getattr(getattr(array, "dtype", None), "itemsize", 0)) or int(typestr[2:])
    return _view(
        array,
        address=int(address),
        shape=shape,
        strides=tuple(int(s) for s in interface.get("strides") or _packed_strides(shape, size)),
        element_bytes=size,
        dtype=_dtype_name(array, typestr),
        kind=kind,
        device=_device_index(getattr(array, "device", None)) if kind == "cuda" else 0,
    )


def _dtype_name(array: Any, typestr: str) -> str:
    # ml_dtypes shows bfloat16 and fp8 as plain bytes in the interface; the dtype knows its name.
    dtype = getattr(array, "dtype", None)
    name = dtype if isinstance(dtype, str) else str(getattr(dtype, "name", typestr[1:]))
    return f">{name}" if typestr.startswith(">") else name


def _device_index(device: Any) -> int:
    """Return the index of a device object of cupy, or of a name such as ``cuda:1``."""
    if isinstance(device, str):
        return int(device.rpartition(":")[2] or 0)
    return int(getattr(device, "id", 0))


def _read_dlpack(name: str, tensor: Any) -> TensorView:
    found = dlpack.read(name, tensor)
    if found.read_only:
        _refuse_read_only(name)
    tag = getattr(tensor, "dtype", None)
    return _view(
        tensor,
        address=found.address,
        shape=found.shape,
        strides=tuple(s * found.element_bytes for s in found.strides or _packed_strides(found.shape, 1)),
        element_bytes=found.element_bytes,
        dtype=tag if isinstance(tag, str) else found.dtype,
        kind=found.kind,
        device=found.device,
    )


def _read_buffer(name: str, tensor: Any) -> TensorView:
    import numpy as np

    try:
        buffer = memoryview(tensor)
    except TypeError as error:
        raise UnsupportedMemory(
            f"tensor {name} is a {type(tensor).__name__}, which has neither DLPack nor a buffer nor a data pointer"
        ) from error
    if buffer.readonly:
        _refuse_read_only(name)
    array = np.asarray(buffer)
    view = _read_array_interface(name, array, array.__array_interface__, kind="host")
    return _view(
        tensor,
        address=view.address,
        shape=view.shape,
        strides=view.strides,
        element_bytes=view.element_bytes,
        dtype=view.dtype,
    )
