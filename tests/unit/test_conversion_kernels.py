"""Converting elements: every 16-bit value, and float32 where it is hard, bit for bit as torch does it."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.conversions import BITS, FLOATS, PAIRS, converted, is_nan
from helpers.late_imports import import_late
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvlink import errors
from kvlink._native import convert_elements

torch = import_late("torch")

SIGNED = {"float32": np.int32, "float16": np.int16, "bfloat16": np.int16}
NARROW = [pair for pair in PAIRS if pair[0] != "float32"]
FROM_FLOAT32 = [pair for pair in PAIRS if pair[0] == "float32"]


def named(pair: tuple[str, str]) -> str:
    return "->".join(pair)


def by_kvlink(bits: np.ndarray, pair: tuple[str, str], *, plainly: bool = False) -> np.ndarray:
    out = np.empty(bits.size, BITS[pair[1]])
    convert_elements(bits.view(np.uint8), out.view(np.uint8), pair, plainly=plainly)
    return out


def by_torch(bits: np.ndarray, pair: tuple[str, str]) -> np.ndarray:
    values = torch.from_numpy(bits.view(SIGNED[pair[0]])).view(getattr(torch, pair[0]))
    signed = values.to(getattr(torch, pair[1])).view(torch.int16 if pair[1] != "float32" else torch.int32)
    return signed.numpy().view(BITS[pair[1]])


def check(bits: np.ndarray, pair: tuple[str, str]) -> None:
    """torch itself makes several NaNs of one, by how it goes about it; here each has one definition."""
    found = by_kvlink(bits, pair)
    number = ~is_nan(bits, pair[0])
    np.testing.assert_array_equal(found[number], by_torch(bits, pair)[number])
    assert is_nan(found[~number], pair[1]).all()
    np.testing.assert_array_equal(found, converted(bits, pair))
    np.testing.assert_array_equal(found, by_kvlink(bits, pair, plainly=True))


@pytest.mark.parametrize("pair", NARROW, ids=named)
def test_every_16_bit_value_becomes_what_torch_makes_of_it(pair: tuple[str, str]) -> None:
    check(np.arange(1 << 16, dtype=np.uint16), pair)


@pytest.mark.parametrize("pair", FROM_FLOAT32, ids=named)
def test_float32_next_to_every_16_bit_value_and_every_tie_is_rounded_as_torch_rounds_it(pair: tuple[str, str]) -> None:
    narrow = np.arange(1 << 16, dtype=np.uint16)
    values = converted(narrow, (pair[1], "float32")).astype(np.int64)
    # Half a step away is a tie: half of the last bit of what is kept, which counts more where float16 is subnormal.
    half = 1 << 15 if pair[1] == "bfloat16" else 1 << 12
    ties = [values + side * half * more + off for side in (-1, 1) for more in (1, 2, 4, 512) for off in (-1, 0, 1)]
    near = np.concatenate([values - 1, values, values + 1, *ties]) & 0xFFFFFFFF
    check(near.astype(np.uint32), pair)


@pytest.mark.parametrize("pair", FROM_FLOAT32, ids=named)
@settings(max_examples=60, deadline=None)
@given(values=arrays.arrays(np.uint32, st.integers(0, 40), elements=st.one_of(
    st.integers(0, 2**32 - 1), st.floats(width=32).map(lambda value: int(np.float32(value).view(np.uint32)))
)))  # fmt: skip
def test_any_float32_is_rounded_as_torch_rounds_it(pair: tuple[str, str], values: np.ndarray) -> None:
    check(values, pair)


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_any_number_of_elements_at_any_place_is_converted_and_nothing_beside_them(pair: tuple[str, str]) -> None:
    rng = np.random.default_rng(20)
    for count in range(35):
        old, new = (count * BITS[dtype].itemsize for dtype in pair)
        source = rng.integers(0, 256, old + 1, np.uint8)
        target = np.full(new + 6, 0x5A, np.uint8)
        convert_elements(source[1:], target[3 : 3 + new], pair)
        expected = converted(source[1:].copy().view(BITS[pair[0]]), pair)
        assert target[3 : 3 + new].tobytes() == expected.tobytes()
        assert set(target[:3].tolist() + target[3 + new :].tolist()) == {0x5A}


def test_what_is_too_large_for_float16_becomes_infinite() -> None:
    values = np.array([65504, 65519.99, 65520, -1e9, np.inf], np.float32)
    found = by_kvlink(values.view(np.uint32), ("float32", "float16")).view(FLOATS["float16"])
    assert found.tolist() == [65504, 65504, np.inf, -np.inf, np.inf]


def test_unlike_numbers_of_elements_and_unknown_dtypes_are_refused() -> None:
    four = np.zeros(4, np.uint8)
    with pytest.raises(errors.InvalidArgument, match="unlike numbers"):
        convert_elements(four, np.zeros(4, np.uint8), ("float32", "float16"))
    with pytest.raises(errors.InvalidArgument, match="float64 does not become"):
        convert_elements(four, four, ("float64", "float16"))
