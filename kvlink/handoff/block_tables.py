"""The block tables that users give, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlink import _native
from kvlink.errors import InvalidArgument

__all__ = ["Blocks", "BlockTable", "Group", "block_tables"]

BlockTable = npt.NDArray[np.int32]
"""Block ids of one group in the order of the request's tokens; -1 is a hole."""

Blocks = Sequence[int] | BlockTable | Mapping[str, Sequence[int] | BlockTable]
"""What users give: one table, or one for each group by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of the node's cache, as far as block tables go.

    With ``slots``, a table lists all that a request has, however many tokens that is.
    """

    name: str
    num_blocks: int
    block_tokens: int
    slots: bool = False


def block_tables(
    blocks: Blocks, groups: Sequence[Group], *, num_tokens: int, operation: str, partial: bool = False
) -> list[BlockTable]:
    """Return one fresh table a group, in the order of `groups`, cut to what `num_tokens` need.

    Entries past the last token are ignored: engines pad their tables. Tables of slots are whole. With
    `partial`, a table may be too short, or missing: more is to come.

    Raises
    ------
    InvalidArgument
        If a table is missing, unknown, too short or not of 32-bit integers, or a block is out of
        range or appears twice.
    """
    if partial and isinstance(blocks, Mapping):
        blocks = {**{group.name: [] for group in groups}, **blocks}
    by_group = _by_group(blocks, groups, operation)
    return [
        _table(
            by_group[group.name],
            group,
            num_tokens=num_tokens,
            called=f"{operation}: blocks[{group.name!r}]",
            partial=partial,
        )
        for group in groups
    ]


def _by_group(blocks: Blocks, groups: Sequence[Group], operation: str) -> Mapping[str, Any]:
    names = [group.name for group in groups]
    if isinstance(blocks, Mapping):
        unknown = sorted(map(str, set(blocks) - set(names)))
        missing = [name for name in names if name not in blocks]
        if unknown or missing:
            raise InvalidArgument(
                f"{operation}: blocks has tables for {sorted(map(str, blocks))}, and the cache has groups {names}"
            )
        return blocks
    if len(groups) != 1:
        raise InvalidArgument(f"{operation}: blocks is one table, and the cache has groups {names}: give one for each")
    return {names[0]: blocks}


def _table(given: Any, group: Group, *, num_tokens: int, called: str, partial: bool) -> BlockTable:
    if not isinstance(given, list | tuple | range):
        given = _as_int32(given, called)
    needed = len(given) if group.slots else -(-num_tokens // group.block_tokens)
    table: BlockTable = np.empty(min(needed, len(given)), dtype=np.int32)
    _native.copy_block_table(given, table, num_blocks=group.num_blocks, called=called)
    if len(table) < needed and not partial:
        raise InvalidArgument(
            f"{called} has {len(given)} blocks, and {num_tokens} tokens in blocks of {group.block_tokens} need {needed}"
        )
    return table


def _as_int32(given: Any, called: str) -> BlockTable:
    if isinstance(given, str | bytes) or not hasattr(given, "__len__"):
        raise InvalidArgument(f"{called} must be a list of block ids or an int32 array, not {type(given).__name__}")
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgument(f"{called} is no array of block ids: {error}") from None
    if array.ndim != 1:
        raise InvalidArgument(f"{called} has {array.ndim} dimensions; a block table has one")
    if array.dtype != np.int32:
        raise InvalidArgument(f"{called} is an array of {array.dtype}; give int32")
    return array
