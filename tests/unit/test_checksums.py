"""The two checksums: known numbers, and the same whatever pieces the bytes come in."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from kvlink import _native
from kvlink.errors import InvalidArgument

# Around the ends of every branch: short inputs, stripes of 64 bytes, the buffer of 256, blocks of 1,024.
LENGTHS = [*range(300), *range(500, 530), *range(1000, 1300), 2047, 2048, 2049, 4096, 65_537, 300_001]


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)


def bitwise_crc32c(data: bytes) -> int:
    """The definition, a bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


# The last is of a buffer of 32 bytes of 0xff in RFC 3720, appendix B.4.
@pytest.mark.parametrize(
    ("data", "crc"), [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)]
)
def test_crc32c_has_its_known_numbers(data: bytes, crc: int):
    assert _native.checksum("crc32c", [array(data)]) == crc
    assert _native.crc32c_by_tables(array(data)) == crc


def test_crc32c_is_what_its_polynomial_says_with_and_without_the_instruction():
    rng = random.Random(1)
    for length in (1, 7, 8, 9, 63, 64, 255, 1000):
        data = rng.randbytes(length)
        assert _native.checksum("crc32c", [array(data)]) == bitwise_crc32c(data)
    for length in LENGTHS:
        data = array(rng.randbytes(length))
        assert _native.checksum("crc32c", [data]) == _native.crc32c_by_tables(data)


def test_xxh3_is_what_the_package_xxhash_says():
    rng = random.Random(2)
    for length in LENGTHS:
        data = rng.randbytes(length)
        assert _native.checksum("xxh3", [array(data)]) == xxhash.xxh3_64_intdigest(data), length


@pytest.mark.parametrize("algorithm", ["crc32c", "xxh3"])
@pytest.mark.parametrize(
    "step",
    [lambda rng: rng.choice([0, 1, 3]), lambda rng: rng.choice([64, 255, 256, 257, 300]), lambda rng: 1024],
    ids=["tiny", "around-the-buffer", "blocks"],
)
def test_pieces_have_the_sum_of_the_whole(algorithm: str, step: Callable[[random.Random], int]):
    rng = random.Random(3)
    for length in (0, 5, 240, 241, 256, 257, 512, 1025, 5000):
        data = array(rng.randbytes(length))
        pieces, at = [], 0
        while at < length:
            size = step(rng)
            pieces.append(data[at : at + size])
            at += size
        assert _native.checksum(algorithm, pieces) == _native.checksum(algorithm, [data])


def test_a_checksum_that_is_none_is_refused():
    for name in ("", "md5"):
        with pytest.raises(InvalidArgument, match="crc32c and xxh3"):
            _native.checksum(name, [])
