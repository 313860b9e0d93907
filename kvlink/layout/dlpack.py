"""Reading the capsule of the DLPack protocol. Its C structures are a stable ABI; nothing is taken over or copied."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

from kvlink.errors import InvalidArgument, UnsupportedMemory

__all__ = ["DLTensorView", "read"]

_HOST_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost (pinned)
_CUDA_DEVICES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_READ_ONLY = 1 << 0  # DLPACK_FLAG_BITMASK_READ_ONLY

_PLAIN_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_FLOAT8_CODES = {
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _VersionedHead(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DLTensorView:
    """What a capsule says. ``strides`` count elements; ``None`` means packed rows."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    element_bytes: int
    dtype: str
    kind: Literal["host", "cuda"]
    device: int
    read_only: bool


def read(name: str, exporter: Any) -> DLTensorView:
    """Read the geometry that `exporter`, called `name` in messages, puts into its capsule.

    The capsule is dropped unused, so the exporter keeps its memory, and the caller keeps the exporter.

    Raises
    ------
    InvalidArgument
        If it refuses to export, as libraries do for read-only memory.
    UnsupportedMemory
        If it lies on another device, or has elements of less than a byte.
    """
    try:
        try:
            capsule = exporter.__dlpack__(max_version=(1, 0))
        except TypeError:  # an exporter of the protocol before 1.0
            capsule = exporter.__dlpack__()
    except (BufferError, RuntimeError) as error:
        raise InvalidArgument(f"tensor {name} cannot be exported by DLPack: {error}") from error
    read_only = False
    versioned = _pointer(capsule, b"dltensor_versioned")
    if versioned is not None:
        head = ctypes.cast(versioned, ctypes.POINTER(_VersionedHead)).contents
        if head.major != 1:
            raise UnsupportedMemory(f"tensor {name} speaks DLPack {head.major}.{head.minor}; kvlink speaks 1.x")
        read_only = bool(head.flags & _READ_ONLY)
        tensor = head.tensor
    else:
        plain = _pointer(capsule, b"dltensor")
        if plain is None:
            raise UnsupportedMemory(f"tensor {name} exports no DLPack capsule, but a {type(capsule).__name__}")
        tensor = ctypes.cast(plain, ctypes.POINTER(_Tensor)).contents
    return _view(name, tensor, read_only=read_only)


def _pointer(capsule: object, name: bytes) -> int | None:
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    if not api.PyCapsule_IsValid(capsule, name):
        return None
    pointer: int | None = api.PyCapsule_GetPointer(capsule, name)
    return pointer


def _view(name: str, tensor: _Tensor, *, read_only: bool) -> DLTensorView:
    if tensor.device.type not in _HOST_DEVICES + _CUDA_DEVICES:
        raise UnsupportedMemory(f"tensor {name} is on a device of DLPack type {tensor.device.type}")
    bits = tensor.dtype.bits * tensor.dtype.lanes
    if bits % 8 != 0:
        raise UnsupportedMemory(f"tensor {name} has elements of {bits} bits; view them as bytes")
    return DLTensorView(
        address=int(tensor.data or 0) + int(tensor.byte_offset),
        shape=tuple(tensor.shape[: tensor.ndim]),
        strides=tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        element_bytes=bits // 8,
        dtype=_dtype_name(tensor.dtype),
        kind="host" if tensor.device.type in _HOST_DEVICES else "cuda",
        device=int(tensor.device.id) if tensor.device.type in _CUDA_DEVICES else 0,
        read_only=read_only,
    )


def _dtype_name(dtype: _DataType) -> str:
    lanes = "" if dtype.lanes == 1 else f"x{dtype.lanes}"
    if dtype.code in _FLOAT8_CODES:
        return _FLOAT8_CODES[dtype.code] + lanes
    if dtype.code == 6 and dtype.bits == 8:
        return f"bool{lanes}"
    return f"{_PLAIN_CODES.get(dtype.code, f'dlpack{dtype.code}_')}{dtype.bits}{lanes}"
