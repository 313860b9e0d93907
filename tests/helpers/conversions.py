"""What becomes of an element that is converted: the reference, from what torch, NumPy and ml_dtypes make of it."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FLOATS = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
BITS = {name: np.dtype(f"uint{8 * dtype.itemsize}") for name, dtype in FLOATS.items()}
PAIRS = tuple((one, other) for one in FLOATS for other in FLOATS if one != other)
# Exponent and mantissa of infinity, and the bit of the mantissa that makes a NaN quiet.
INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
QUIET = {"float32": 0x00400000, "float16": 0x0200, "bfloat16": 0x0040}


def converted(bits: np.ndarray, pair: tuple[str, str]) -> np.ndarray:
    """Return the bits of each element in the second dtype, for bits in the first."""
    old, new = pair
    bits = np.ascontiguousarray(bits).view(BITS[old])
    with np.errstate(over="ignore", invalid="ignore"):
        values = bits.view(FLOATS[old]).astype(np.float32).astype(FLOATS[new])
    found = values.view(BITS[new])
    nan = is_nan(bits, old)
    return np.where(nan, _nans(bits, pair), found) if nan.any() else found


def is_nan(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Return which elements are NaNs."""
    everything_but_the_sign = (1 << (8 * BITS[dtype].itemsize - 1)) - 1
    return (bits & everything_but_the_sign) > INFINITY[dtype]


def _nans(bits: np.ndarray, pair: tuple[str, str]) -> np.ndarray:
    """A NaN keeps its sign and the upper bits of its payload, and is quiet unless all of its bits are kept."""
    old, new = pair
    wide = bits.astype(np.uint32)
    if old == "float16":
        wide = (wide & 0x8000) << 16 | INFINITY["float32"] | QUIET["float32"] | (wide & 0x3FF) << 13
    elif old == "bfloat16":
        wide = wide << 16
    if new == "bfloat16":
        wide = wide >> 16 | QUIET["bfloat16"]
    elif new == "float16":
        wide = wide >> 16 & 0x8000 | INFINITY["float16"] | QUIET["float16"] | wide >> 13 & 0x3FF
    return wide.astype(BITS[new])
