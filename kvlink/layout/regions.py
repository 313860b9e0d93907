"""The memory behind a layout: a few regions that a node registers and shows to its peers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from kvlink.layout.geometry import PartLayout

__all__ = ["Allocation", "MemoryRegion", "locate_parts"]


class Allocation(Protocol):
    """A piece of memory that was allocated as a whole, such as a pool of ``kvlink.empty``."""

    @property
    def address(self) -> int:
        """First byte."""
        ...

    @property
    def nbytes(self) -> int:
        """Size."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRegion:
    """Contiguous bytes of this process. ``owner`` is whatever keeps them alive."""

    address: int
    nbytes: int
    owner: object
    kind: Literal["host", "cuda"] = "host"
    device: int = 0

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + self.nbytes


def locate_parts(
    parts: Sequence[tuple[int, PartLayout]], extents: Sequence[MemoryRegion]
) -> tuple[tuple[PartLayout, ...], tuple[MemoryRegion, ...]]:
    """Return parts that count from the start of a region, and the regions.

    `parts` come with their absolute addresses, and each lies in one of the `extents`. Extents that overlap
    become one region. Those that only touch stay apart: two allocations may be neighbours by accident, and a
    registration or a mapping cannot reach from one into the other.
    """
    merged: list[MemoryRegion] = []
    for extent in sorted(extents, key=lambda e: (e.address, -e.nbytes)):
        if merged and extent.address < merged[-1].end:
            merged[-1] = _joined(merged[-1], extent)
        else:
            merged.append(extent)
    starts = [region.address for region in merged]
    # Regions count in the order of the parts, so that a layout does not depend on where the allocator put things.
    order = list(dict.fromkeys(bisect_right(starts, address) - 1 for address, _ in parts))
    regions = tuple(merged[i] for i in order)
    index_of = {i: index for index, i in enumerate(order)}
    located = []
    for address, part in parts:
        i = bisect_right(starts, address) - 1
        located.append(msgspec.structs.replace(part, region=index_of[i], offset=address - starts[i]))
    return tuple(located), regions


def _joined(region: MemoryRegion, extent: MemoryRegion) -> MemoryRegion:
    owners = region.owner if isinstance(region.owner, tuple) else (region.owner,)
    return MemoryRegion(
        address=region.address,
        nbytes=max(region.end, extent.end) - region.address,
        owner=(*owners, extent.owner),
        kind=region.kind,
        device=region.device,
    )
