"""The blocks of the benchmark: a wrong byte anywhere must be seen."""

import numpy as np
import pytest

from kvlink import _native
from kvlink.bench.scattered import Geometry, Pool, permutation, run_offsets
from kvlink.errors import InvalidArgument

GEOMETRY = Geometry(block_bytes=4096, total_bytes=256 * 1024)
SEED = 7


def moved_by_memcpy():
    """A source and a target pool of which the target holds the blocks of one request."""
    source, target = Pool(GEOMETRY, memory="private"), Pool(GEOMETRY, memory="private")
    source.fill(seed=SEED)
    tables = permutation(GEOMETRY, seed=1), permutation(GEOMETRY, seed=2)
    _native.memcpy_seconds(
        source=source.bytes,
        target=target.bytes,
        source_offsets=run_offsets(GEOMETRY, tables[0]),
        target_offsets=run_offsets(GEOMETRY, tables[1]),
        run_bytes=GEOMETRY.block_bytes,
    )
    return target, dict(zip(("source_table", "target_table"), tables, strict=True))


def test_the_bytes_of_scattered_blocks_are_recognised():
    target, tables = moved_by_memcpy()
    assert target.holds(**tables, seed=SEED)
    assert not target.holds(**tables, seed=SEED + 1)


@pytest.mark.parametrize("where", ["first", "last", "neighbour"])
def test_one_wrong_byte_is_seen(where):
    target, tables = moved_by_memcpy()
    table = tables["target_table"]
    if where == "neighbour":
        block = next(index for index in range(GEOMETRY.pool_blocks) if index not in table)
        place = block * GEOMETRY.block_bytes + 5
    else:
        place = int(run_offsets(GEOMETRY, table)[0 if where == "first" else -1]) + (0 if where == "first" else 4095)
    target.bytes[place] ^= 1
    assert not target.holds(**tables, seed=SEED)


def test_two_blocks_exchanged_are_seen():
    target, tables = moved_by_memcpy()
    exchanged = tables["source_table"].copy()
    exchanged[[0, 1]] = exchanged[[1, 0]]
    assert not target.holds(source_table=exchanged, target_table=tables["target_table"], seed=SEED)


def test_a_table_is_a_permutation_without_repeats():
    table = permutation(GEOMETRY, seed=3)
    assert len(set(table.tolist())) == GEOMETRY.entries == 32
    assert table.tolist() != sorted(table.tolist())
    assert GEOMETRY.runs * GEOMETRY.block_bytes == 256 * 1024


@pytest.mark.parametrize(("block_bytes", "total_bytes"), [(100, 1 << 20), (1 << 20, 1 << 20)])
def test_a_geometry_without_whole_blocks_is_refused(block_bytes, total_bytes):
    with pytest.raises(InvalidArgument):
        Geometry(block_bytes=block_bytes, total_bytes=total_bytes)


def test_memcpy_refuses_a_run_that_leaves_its_pool():
    pool = np.zeros(100, dtype=np.uint8)
    offset = np.array([93], dtype=np.uint64)
    with pytest.raises(InvalidArgument, match="leaves the source pool of 100 bytes"):
        _native.memcpy_seconds(source=pool, target=pool, source_offsets=offset, target_offsets=offset, run_bytes=8)
