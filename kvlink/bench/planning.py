"""From a request's block tables to the last copy handed over, where handing over is all that is done: no bytes move."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

import kvlink
from kvlink import _native
from kvlink.bench.scattered import BLOCK_TOKENS
from kvlink.errors import InvalidArgument
from kvlink.handoff.block_tables import Group, block_tables
from kvlink.plan import compile_template

__all__ = ["PlanRow", "PlanSetting", "measure_plan"]

#: Bytes of a token in one run. Nothing reads or writes the memory: only its description is used.
_TOKEN_BYTES = 64
#: Regions that touch would be one, so each has an end that no tensor covers.
_APART = 4096
_WARM_UPS = 3


class PlanRow(TypedDict):
    """What is reported of one size of request."""

    system: str
    blocks: int
    regions: int
    runs: int
    copies: int
    request_to_last_post_us_median: float
    request_to_last_post_us_min: float
    request_to_last_post_us_max: float
    check_us_median: float
    plan_us_median: float
    post_us_median: float


@dataclass(frozen=True, kw_only=True)
class PlanSetting:
    """What is measured: one request of `blocks` blocks in a cache of `regions` regions, a K or a V of a layer each."""

    blocks: int
    regions: int
    repeat: int

    def __post_init__(self) -> None:
        """Refuse what is no cache."""
        if self.blocks < 1 or self.regions < 2 or self.regions % 2:
            raise InvalidArgument(f"{self.blocks} blocks x {self.regions} regions: give blocks, and K and V of layers")


def measure_plan(setting: PlanSetting) -> PlanRow:
    """Run a few warm-ups and ``setting.repeat`` repetitions in this process and return their row."""
    cache = _cache(setting)
    template = compile_template(cache.layout, cache.layout)
    group = Group(name="full", num_blocks=setting.blocks, block_tokens=BLOCK_TOKENS)
    rng = np.random.default_rng(1)
    num_tokens = setting.blocks * BLOCK_TOKENS
    phases = []
    copies = 0
    for index in range(setting.repeat + _WARM_UPS):
        source, target = (rng.permutation(setting.blocks).astype(np.int32) for _ in range(2))
        started = time.perf_counter()
        # The target's table is checked as `Node.pull` does, and paired with the source's as its grant does.
        tables = block_tables(target, [group], num_tokens=num_tokens, operation="bench plan")
        checked = time.perf_counter()
        plan = _native.Plan(template, [source], tables, end_token=num_tokens)
        planned = time.perf_counter()
        copies, _, _ = plan.count_copies()
        posted = time.perf_counter()
        if index >= _WARM_UPS:
            phases.append((checked - started, planned - checked, posted - planned))
    check_us, plan_us, post_us = (statistics.median(phase) * 1e6 for phase in zip(*phases, strict=True))
    total = [sum(repetition) * 1e6 for repetition in phases]
    return PlanRow(
        system="kvlink",
        blocks=setting.blocks,
        regions=setting.regions,
        runs=setting.blocks * setting.regions,
        copies=copies,
        request_to_last_post_us_median=statistics.median(total),
        request_to_last_post_us_min=min(total),
        request_to_last_post_us_max=max(total),
        check_us_median=check_us,
        plan_us_median=plan_us,
        post_us_median=post_us,
    )


def _cache(setting: PlanSetting) -> kvlink.KVCache:
    shape = (setting.blocks, BLOCK_TOKENS, 1, _TOKEN_BYTES)
    size = setting.blocks * BLOCK_TOKENS * _TOKEN_BYTES

    def tensor() -> Any:
        return np.zeros(size + _APART, dtype=np.uint8)[:size].reshape(shape)

    tensors = {f"layers.{number}": {"k": tensor(), "v": tensor()} for number in range(setting.regions // 2)}
    cache = kvlink.KVCache.from_tensors(tensors, axes="block token head dim", block_tokens=BLOCK_TOKENS)
    if len(cache.regions) != setting.regions:
        raise InvalidArgument(f"the cache has {len(cache.regions)} regions instead of {setting.regions}")
    return cache
