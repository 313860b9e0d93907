"""Block tables as vLLM's scheduler has them, and as a node takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["NULL_BLOCK", "PagedGroup", "node_tables", "whole_blocks"]

NULL_BLOCK = 0
"""The block that stands in vLLM's tables where there is none: before a sliding window, for example."""

_HOLE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedGroup:
    """How one group is paged for vLLM's scheduler, and for its kernels.

    Attributes
    ----------
    name
        As the node's cache calls it.
    index
        Among the groups of vLLM's configuration.
    block_tokens
        Tokens of a block as the scheduler counts them.
    split
        Blocks of the node's cache that one of the scheduler's is: kernels may want smaller ones.
    """

    name: str
    index: int
    block_tokens: int
    split: int = 1


def whole_blocks(num_tokens: int, sizes: Sequence[int]) -> int:
    """Return `num_tokens`, rounded up to blocks of each of `sizes`, which divide the largest of them."""
    largest = max(sizes, default=1)
    return -(-num_tokens // largest) * largest


def node_tables(
    tables: Sequence[Sequence[int]], groups: Sequence[PagedGroup], *, num_tokens: int
) -> Mapping[str, list[int]]:
    """Return a table for each of `groups`, whose entries reach `num_tokens`: what is missing at the end is holes."""
    converted = {}
    for group in groups:
        needed = -(-num_tokens // group.block_tokens) * group.split
        table: list[int] = []
        for block in tables[group.index]:
            if block == NULL_BLOCK:
                table += [_HOLE] * group.split
            else:
                table += range(block * group.split, (block + 1) * group.split)
        table += [_HOLE] * (needed - len(table))
        converted[group.name] = table[:needed]
    return converted
