"""The cache as users describe it: tensors by layer name, and what their dimensions mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvlink.errors import InvalidArgument
from kvlink.layout.axes import parse_axes
from kvlink.layout.description import OtherComponent, TensorDescription
from kvlink.layout.geometry import CacheLayout, GroupLayout, PartLayout
from kvlink.layout.regions import Allocation, MemoryRegion, locate_parts
from kvlink.layout.validation import validate_layout

__all__ = ["KVCache"]


class KVCache:
    """Describes the memory of a paged KV cache. Registers nothing, and keeps the tensors alive.

    Immutable. Made by ``from_tensors`` and ``join``.
    """

    __slots__ = ("layout", "regions")

    layout: CacheLayout
    regions: tuple[MemoryRegion, ...]

    def __init__(self, *, layout: CacheLayout, regions: Sequence[MemoryRegion]) -> None:
        """Check `layout` against the `regions` that it counts from.

        Raises
        ------
        InvalidArgument
            If two blocks share bytes, or something lies outside of its region.
        """
        if layout.region_bytes != tuple(region.nbytes for region in regions):
            raise InvalidArgument("the layout's regions have other sizes than the memory regions")
        validate_layout(layout)
        self.layout = layout
        self.regions = tuple(regions)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Any],
        *,
        axes: str,
        block_tokens: int | None = None,
        heads: range | None = None,
        total_kv_heads: int | None = None,
        group: str = "full",
        window: int | None = None,
        component: OtherComponent | None = None,
        layers: Sequence[str] | None = None,
        dtype: str | None = None,
        model: str | None = None,
    ) -> KVCache:
        """Describe tensors of torch, numpy, cupy or anything with DLPack or a buffer, by global layer name.

        `axes` names each tensor dimension: a permutation of ``"kv block token head dim"``. Without ``kv``, a value
        is ``{"k": tk, "v": tv}``. Without ``head``, the data is the same on every rank; without both, it is one
        latent a token (MLA). With a ``layer`` axis, `tensors` has one entry and `layers` names its layers.

        `component` says that a group holds something else: ``"scale"``, numbers that go with K and V or with latents,
        for each token and head (``head`` and ``dim`` may be missing, a ``kv`` axis or ``{"k": tk, "v": tv}`` tells
        those of K and V apart); ``"latent"``, one tensor a layer whatever its axes. With ``slot`` instead of ``block``
        and ``token``, a group holds ``"state"`` that a request has as a whole, such as that of a linear attention:
        `axes` are ``"slot head dim"`` or ``"slot dim"``, and the block table lists the request's slots.

        `heads` are the KV heads of this rank out of `total_kv_heads`; all of them by default. `window` is the size
        of a sliding window. `dtype` overrides the tag of the elements, such as ``"float8_e4m3fn"`` for bytes.
        `model` is a fingerprint that both sides must share, if both give one.

        Raises
        ------
        InvalidArgument
            For axes, shapes, heads or memory that cannot be a paged cache, and for read-only memory.
        UnsupportedMemory
            For an object that shows no memory, or memory of another device than a CPU or a CUDA GPU.
        """
        description = TensorDescription(
            axes=parse_axes(axes),
            block_tokens=block_tokens,
            component=component,
            group=group,
            heads=heads,
            total_kv_heads=total_kv_heads,
            layers=None if layers is None else tuple(layers),
            dtype=dtype,
        )
        read = description.read(tensors)
        layout = GroupLayout(
            name=group,
            num_blocks=read.num_blocks,
            block_tokens=1 if block_tokens is None else block_tokens,
            window=window,
            slots=description.slots,
        )
        return cls._located((layout,), read.parts, read.extents, model)

    @classmethod
    def join(cls, *caches: KVCache, shared: bool = False) -> KVCache:
        """Return one cache with the groups of all, each with its own block table.

        With `shared`, all of these groups draw their blocks from one block pool, and may lie in the same bytes: a block
        belongs to one group at a time, and its number alone tells it from others.

        Raises
        ------
        InvalidArgument
            If two caches have a group of the same name, share bytes, or are of different models. With `shared`, if
            they differ in their number of blocks, or two blocks of different numbers share bytes.
        """
        models = {cache.layout.model for cache in caches} - {None}
        if not caches or len(models) > 1:
            raise InvalidArgument(f"join takes caches of one model, not of {len(models)}")
        groups = tuple(group for cache in caches for group in cache.layout.groups)
        if shared:
            groups = tuple(msgspec.structs.replace(group, block_pool=groups[0].name) for group in groups)
        parts = [part for cache in caches for part in cache._absolute_parts()]
        extents = [region for cache in caches for region in cache.regions]
        return cls._located(groups, parts, extents, models.pop() if models else None)

    def within_allocations(self, find: Callable[[int], Allocation | None]) -> KVCache:
        """Return the same cache with regions that are whole allocations, where `find` knows one for an address.

        A peer maps an allocation as a whole or not at all, so nodes register those.
        """
        extents = []
        for region in self.regions:
            found = find(region.address)
            if found is not None and found.address <= region.address and region.end <= found.address + found.nbytes:
                region = MemoryRegion(
                    address=found.address,
                    nbytes=found.nbytes,
                    owner=region.owner,
                    kind=region.kind,
                    device=region.device,
                )
            extents.append(region)
        return self._located(self.layout.groups, self._absolute_parts(), extents, self.layout.model)

    def __repr__(self) -> str:
        """Name the groups and their sizes."""
        groups = ", ".join(
            f"{group.name}: {group.num_blocks} slots"
            if group.slots
            else f"{group.name}: {group.num_blocks} blocks of {group.block_tokens} tokens"
            for group in self.layout.groups
        )
        return f"<kvlink.KVCache {groups}; {sum(self.layout.region_bytes):,} bytes>"

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, in the order in which ``blocks`` lists their tables."""
        return tuple(group.name for group in self.layout.groups)

    def num_blocks(self, group: str | None = None) -> int:
        """Return how many blocks `group` has; the first group by default."""
        return self._group(group).num_blocks

    def block_tokens(self, group: str | None = None) -> int:
        """Return how many tokens a block of `group` holds; the first group by default."""
        return self._group(group).block_tokens

    def _group(self, name: str | None) -> GroupLayout:
        try:
            return self.layout.groups[0] if name is None else self.layout.group(name)
        except KeyError:
            raise InvalidArgument(f"there is no group {name!r}; the groups are {' '.join(self.groups)}") from None

    def _absolute_parts(self) -> list[tuple[int, PartLayout]]:
        return [(self.regions[part.region].address + part.offset, part) for part in self.layout.parts]

    @classmethod
    def _located(
        cls,
        groups: tuple[GroupLayout, ...],
        parts: Sequence[tuple[int, PartLayout]],
        extents: Sequence[MemoryRegion],
        model: str | None,
    ) -> KVCache:
        located, regions = locate_parts(parts, extents)
        sizes = tuple(region.nbytes for region in regions)
        return cls(layout=CacheLayout(groups=groups, parts=located, region_bytes=sizes, model=model), regions=regions)
