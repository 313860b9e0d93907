"""The layout of one cache as plain data: what a node sends to its peers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["CacheLayout", "Component", "GroupLayout", "PartLayout"]

Component = Literal["k", "v", "latent", "state", "scale", "k_scale", "v_scale"]

# Native code counts in 64 bits and signs some of it; block tables hold int32.
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that share one block table.

    ``window`` counts the tokens that a sliding window attends to; ``None`` is full attention. With ``slots``, a
    block is a slot of state that a request has as a whole: it holds no tokens, and ``block_tokens`` is 1. Groups with
    the same ``block_pool`` draw their blocks from it and may lie in the same bytes: a block belongs to one of them at
    a time.
    """

    name: _Name
    num_blocks: _Count
    block_tokens: _Count
    window: _Count | None = None
    slots: bool = False
    block_pool: _Name | None = None


class PartLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one component of one layer lies, for a contiguous range of KV heads.

    The byte of (block, token, head, dim) is ``offset + block * block_stride + token * token_stride +
    (head - head_start) * head_stride + dim * dim_stride``, counted from the start of region ``region``. Strides
    are in bytes, and 0 on an axis with one element. Elements are opaque: a size and a tag.
    """

    group: _Name
    layer: _Name
    component: Component
    head_start: _Index
    head_count: _Count
    total_kv_heads: _Count
    head_dim: _Count
    element_bytes: _Count
    dtype: _Name
    region: _Index
    offset: _Bytes
    block_stride: _Bytes
    token_stride: _Bytes
    head_stride: _Bytes
    dim_stride: _Bytes

    @property
    def label(self) -> str:
        """How messages call this part."""
        heads = f"heads {self.head_start}..{self.head_start + self.head_count - 1}"
        return f"{self.component} of {self.layer} in group {self.group}, {heads}"


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The byte geometry of a cache, or of what is taken of it from one source. Regions are known by index and size.

    A group without parts is one of which nothing is taken; it keeps its place, and so its block table.
    """

    groups: Annotated[tuple[GroupLayout, ...], msgspec.Meta(min_length=1, max_length=64)]
    parts: Annotated[tuple[PartLayout, ...], msgspec.Meta(max_length=16384)]
    region_bytes: Annotated[tuple[_Bytes, ...], msgspec.Meta(min_length=1, max_length=16384)]
    model: _Name | None = None

    def group(self, name: str) -> GroupLayout:
        """Return the group called `name`; ``KeyError`` if there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)
