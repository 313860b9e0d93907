"""vLLM's KV cache as kvlink describes it: all from the configuration and the tensors' strides, for any of its layouts.

vLLM views each layer as ``[block, head, token, content]``, wherever these lie: layers outermost (LBHNC, LBNHC, LHBNC)
or blocks (BLHNC, BLNHC, BHLNC), all layers in one allocation, groups over each other. K and V of a token are one
content, which is opaque here; its tag says what it is, and only equal tags are paired.

Some backends pack a block so that its tokens cannot be told apart, such as that of CPUs, which keeps K of all tokens
before V of all, in an order of its vector instructions. Then the tag names the packing and the block size, so that
nodes of another one are refused when they connect; and blocks move whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.engines.vllm.tables import PagedGroup
from kvlink.errors import UnsupportedMemory
from kvlink.layout.cache import KVCache
from kvlink.layout.geometry import CacheLayout, GroupLayout, PartLayout
from kvlink.layout.regions import MemoryRegion

__all__ = ["CacheGroup", "Content", "DescribedCache", "RankPlace", "content_of", "describe", "read_groups"]

# Backends whose blocks hold one content a token, in the order of the view.
_TOKEN_BY_TOKEN = {
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "FLEX_ATTENTION",
    "CPU_MLA",
    "AMX_MLA",
    "TRITON_MLA",
    "FLASHMLA",
    "FLASH_ATTN_MLA",
    "FLASHINFER_MLA",
    "CUTLASS_MLA",
}
_PLAIN_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", "half", "float", "fp8", "fp8_e4m3", "fp8_e5m2")

# What a group may keep, by the names of the classes of its specification, which are not imported here.
_WITH_BLOCKS = {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
_WITHOUT = {
    "MambaSpec": "state of a linear attention or a convolution",
    "CrossAttentionSpec": "cross attention",
    "EncoderOnlyAttentionSpec": "attention of an encoder",
    "CircularBufferSpec": "a ring of keys",
    "HiSparseHotSpec": "a sparse cache",
    "HiSparseResidentSpec": "a sparse cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a layer keeps for each token and head.

    Attributes
    ----------
    tag
        Says what the bytes are: equal ones can be copied.
    whole_blocks
        Tokens of a block cannot be told apart.
    """

    tag: str
    whole_blocks: bool


def content_of(
    *, dtype: str, backend: str, block_tokens: int, cache_dtype: str = "auto", isa: str | None = None
) -> Content:
    """Return what a layer of attention backend `backend` keeps, in kernel blocks of `block_tokens`.

    `cache_dtype` is vLLM's setting of that name, `dtype` that of the tensor, `isa` how the backend of CPUs packs.
    """
    kind = cache_dtype if cache_dtype.startswith("fp8") else dtype
    if backend in _TOKEN_BY_TOKEN and cache_dtype in _PLAIN_CACHE_DTYPES:
        return Content(tag=kind, whole_blocks=False)
    packing = f"{backend.lower()}{f'-{isa}' if isa else ''}"
    quantised = "" if cache_dtype in _PLAIN_CACHE_DTYPES else f" {cache_dtype}"
    return Content(tag=f"{kind}{quantised} packed by {packing} in blocks of {block_tokens}", whole_blocks=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table, as vLLM's configuration has them.

    Attributes
    ----------
    index
        Among all groups of the configuration.
    shards
        Into how many shares tensor parallelism cuts each layer at most; ``None``: one a rank.
    """

    index: int
    layers: tuple[str, ...]
    block_tokens: int
    window: int | None = None
    shards: Mapping[str, int | None]

    @property
    def name(self) -> str:
        """What both sides call it: groups are in the order of the model's configuration."""
        return f"group{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which share of the heads a worker has.

    Attributes
    ----------
    total_kv_heads
        Of the model; 0 if that is not known.
    """

    tp_rank: int = 0
    tp_size: int = 1
    total_kv_heads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedCache:
    """A worker's cache, and how tables become those of its node."""

    cache: KVCache
    groups: tuple[PagedGroup, ...]
    whole_blocks: bool


def read_groups(kv_cache_config: Any) -> list[CacheGroup]:
    """Return the groups of vLLM's ``KVCacheConfig`` that are handed over.

    Raises
    ------
    UnsupportedMemory
        If one keeps something that is not paged by tokens.
    """
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if not getattr(group, "enable_kv_transfer", True):
            continue
        shards = {}
        windows = set()
        for layer in group.layer_names:
            spec = group.kv_cache_spec
            spec = getattr(spec, "kv_cache_specs", {}).get(layer, spec)
            _check_spec(spec, layer)
            shards[layer] = getattr(spec, "max_tp_shards", None)
            windows.add(_window_of(spec))
        if len(windows) > 1:
            raise UnsupportedMemory(f"group {index} has layers with windows {sorted(map(str, windows))}")
        groups.append(
            CacheGroup(
                index=index,
                layers=tuple(group.layer_names),
                block_tokens=int(group.kv_cache_spec.block_size),
                window=windows.pop() if windows else None,
                shards=shards,
            )
        )
    return groups


def _check_spec(spec: Any, layer: str) -> None:
    names = {cls.__name__ for cls in type(spec).__mro__}
    for name, what in _WITHOUT.items():
        if name in names:
            raise UnsupportedMemory(f"layer {layer} keeps {what} ({name}), which KvlinkConnector does not hand over")
    if not names & _WITH_BLOCKS:
        raise UnsupportedMemory(f"layer {layer} has a {type(spec).__name__}, which KvlinkConnector does not know")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise UnsupportedMemory(f"layer {layer} keeps one state for {spec.tokens_per_state} tokens, not one a token")


def _window_of(spec: Any) -> int | None:
    if "SlidingWindowSpec" not in {cls.__name__ for cls in type(spec).__mro__}:
        return None
    # Without it, multi-module speculative decoding would find the start of its window missing.
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def describe(
    kv_caches: Mapping[str, Any],
    groups: Sequence[CacheGroup],
    *,
    num_blocks: int,
    place: RankPlace,
    content: Callable[[str, int], Content],
    model: str | None = None,
) -> DescribedCache:
    """Describe the tensors of a worker; what a pipeline stage lacks of `groups` is left out.

    `content` returns what a layer keeps, given its name and the tokens of its kernel blocks. Each allocation
    that the tensors are views of becomes one region.

    Raises
    ------
    UnsupportedMemory
        If a tensor is not what vLLM 0.32 and 0.33 make.
    InvalidArgument
        If blocks of different numbers share bytes.
    """
    regions: dict[int, MemoryRegion] = {}
    parts: list[tuple[int, PartLayout]] = []
    layouts: list[GroupLayout] = []
    paged: list[PagedGroup] = []
    kinds: list[Content] = []
    for group in groups:
        present = [layer for layer in group.layers if layer in kv_caches]
        if not present:
            continue
        split = _split(kv_caches[present[0]], present[0], num_blocks, group.block_tokens)
        kernel_tokens = group.block_tokens // split
        paged.append(PagedGroup(name=group.name, index=group.index, block_tokens=group.block_tokens, split=split))
        found = [content(layer, kernel_tokens) for layer in present]
        kinds += found
        layouts.append(
            GroupLayout(
                name=group.name,
                num_blocks=num_blocks * split,
                block_tokens=kernel_tokens,
                window=_moved_window(group.window, kernel_tokens, whole=any(one.whole_blocks for one in found)),
            )
        )
        for layer, kind in zip(present, found, strict=True):
            tensor = kv_caches[layer]
            if _split(tensor, layer, num_blocks, group.block_tokens) != split:
                raise UnsupportedMemory(f"layer {layer} has other kernel blocks than the rest of {group.name}")
            base = _region_of(tensor, regions)
            parts.append((base, _part(tensor, layer, group, kind.tag, _heads(tensor, group.shards[layer], place))))
    if not parts:
        raise UnsupportedMemory("this worker has no KV cache to hand over")
    cache = _joined(layouts, parts, regions, model)
    return DescribedCache(cache=cache, groups=tuple(paged), whole_blocks=any(kind.whole_blocks for kind in kinds))


def _joined(
    layouts: list[GroupLayout],
    parts: list[tuple[int, PartLayout]],
    regions: dict[int, MemoryRegion],
    model: str | None,
) -> KVCache:
    order = {base: number for number, base in enumerate(regions)}
    located = []
    for base, part in parts:
        located.append(_replaced(part, region=order[base], offset=part.offset - regions[base].address))
    if len(layouts) > 1:  # vLLM gives all groups blocks of one pool, and lays them over each other
        if len({layout.num_blocks for layout in layouts}) > 1:
            raise UnsupportedMemory("groups of one block pool have kernel blocks of different sizes")
        layouts = [_replaced(layout, block_pool="blocks") for layout in layouts]
    sizes = tuple(region.nbytes for region in regions.values())
    layout = CacheLayout(groups=tuple(layouts), parts=tuple(located), region_bytes=sizes, model=model)
    return KVCache(layout=layout, regions=tuple(regions.values()))


def _replaced(struct: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(struct, **changes)


def _split(tensor: Any, layer: str, num_blocks: int, block_tokens: int) -> int:
    """Return how many of the tensor's blocks one of the scheduler's is."""
    shape = tuple(tensor.shape)
    if len(shape) != 4:
        raise UnsupportedMemory(f"layer {layer} has shape {shape}, not [block, head, token, content]")
    split, rest = divmod(int(shape[0]), num_blocks)
    if rest or split * int(shape[2]) != block_tokens:
        raise UnsupportedMemory(
            f"layer {layer} has shape {shape}, which is not {num_blocks} blocks of {block_tokens} tokens"
        )
    return split


def _region_of(tensor: Any, regions: dict[int, MemoryRegion]) -> int:
    storage = tensor.untyped_storage()
    base = int(storage.data_ptr())
    if base not in regions:
        kind = str(tensor.device.type)
        if kind not in ("cpu", "cuda"):
            raise UnsupportedMemory(f"the KV cache is on a device of kind {kind}: kvlink moves memory of cpu and cuda")
        regions[base] = MemoryRegion(
            address=base,
            nbytes=int(storage.nbytes()),
            owner=storage,
            kind="cuda" if kind == "cuda" else "host",
            device=int(tensor.device.index or 0),
        )
    return base


def _heads(tensor: Any, shards: int | None, place: RankPlace) -> tuple[int, int]:
    """Return the first head of the tensor's and how many there are on all ranks together."""
    own = int(tensor.shape[1])
    total = place.total_kv_heads
    if shards is None:
        replicated = own == 1 and 0 < total < place.tp_size and place.tp_size % total == 0
        shards = total if replicated else place.tp_size
    shards = min(shards, place.tp_size)
    return place.tp_rank * shards // place.tp_size * own, own * shards


def _part(tensor: Any, layer: str, group: CacheGroup, tag: str, heads: tuple[int, int]) -> PartLayout:
    size = int(tensor.element_size())
    blocks, own_heads, tokens, dims = map(int, tensor.shape)
    strides = list(_byte_strides(tensor, size))
    return PartLayout(
        group=group.name,
        layer=layer,
        component="latent",
        head_start=heads[0],
        head_count=own_heads,
        total_kv_heads=heads[1],
        head_dim=dims,
        element_bytes=size,
        dtype=tag,
        region=0,
        offset=int(tensor.data_ptr()),
        block_stride=strides[0] if blocks > 1 else 0,
        token_stride=strides[2] if tokens > 1 else 0,
        head_stride=strides[1] if own_heads > 1 else 0,
        dim_stride=strides[3] if dims > 1 else 0,
    )


def _byte_strides(tensor: Any, size: int) -> Iterator[int]:
    for stride in tensor.stride():
        yield int(stride) * size


def _moved_window(window: int | None, block_tokens: int, *, whole: bool) -> int | None:
    """Return the window as tokens of a handoff count it.

    Where blocks move whole, a handoff ends with its last block: the window reaches back to the start of the first
    block that has a token of it, wherever the request ends in the last one.
    """
    if window is None or not whole:
        return window
    return -(-window // block_tokens) * block_tokens + block_tokens
