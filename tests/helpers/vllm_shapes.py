"""Stand-ins for what vLLM has: tensors with the shapes and strides of each of its layouts, specifications, requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def views(
    torch: Any,
    layout: str,
    *,
    layers: int,
    blocks: int,
    heads: int,
    tokens: int,
    content: int,
    dtype: Any = None,
    raw: Any = None,
    split: int = 1,
) -> list[Any]:
    """Return one [block, head, token, content] view for each layer, all of one allocation, as `layout` orders them.

    `split` cuts each block into so many for the kernels, as vLLM does where a block is one dense page.
    """
    sizes = {"L": layers, "B": blocks * split, "H": heads, "N": tokens // split, "C": content}
    strides, stride = {}, 1
    for axis in reversed(layout):
        strides[axis] = stride
        stride *= sizes[axis]
    dtype = torch.int16 if dtype is None else dtype
    storage = torch.zeros(stride, dtype=dtype) if raw is None else raw
    shape = [sizes[axis] for axis in "LBHNC"]
    whole = torch.as_strided(storage, shape, [strides[axis] for axis in "LBHNC"])
    return list(whole)


class KVCacheSpec:
    """Named like vLLM's, since only the names of classes are looked at."""

    def __init__(self, block_size: int, **more: Any) -> None:
        self.block_size = block_size
        self.__dict__.update(more)


class FullAttentionSpec(KVCacheSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(KVCacheSpec):
    pass


class MambaSpec(KVCacheSpec):
    pass


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool = True


@dataclass
class CacheConfig:
    kv_cache_groups: list[Group]
    num_blocks: int


Status = Enum("Status", "RUNNING FINISHED_LENGTH_CAPPED FINISHED_STOPPED FINISHED_ABORTED")


@dataclass
class Request:
    """As far as a connector looks at vLLM's."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    status: Any = Status.RUNNING
    max_tokens: int = 16
    prompt_embeds: Any = None
    _all_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._all_token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)

    def get_skip_reading_prefix_cache(self) -> bool:
        return False
