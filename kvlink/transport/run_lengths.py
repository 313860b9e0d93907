"""How long the pieces are that a template copies: what decides between lanes."""

from __future__ import annotations

import math

from kvlink.layout import CacheLayout
from kvlink.layout.geometry import PartLayout

__all__ = ["mean_run_bytes"]


def mean_run_bytes(source: CacheLayout, target: CacheLayout) -> float:
    """Return the mean length of what lies together on both sides, for whole blocks of all parts of `target`.

    0 when `target` has no parts, or `source` none of them. `target` may be restricted to what
    `source` delivers. Runs that merge across blocks or parts are not foreseen.
    """
    source_tokens = {group.name: group.block_tokens for group in source.groups}
    target_tokens = {group.name: group.block_tokens for group in target.groups}
    found: dict[tuple[str, str, str], list[PartLayout]] = {}
    for part in source.parts:
        found.setdefault((part.group, part.layer, part.component), []).append(part)
    total_bytes, total_runs = 0.0, 0.0
    for part in target.parts:
        # Sub-blocks that lie in one block on both sides, if the tokens of both tables count from 0.
        tokens = math.gcd(source_tokens.get(part.group, 1), target_tokens[part.group])
        for held in found.get((part.group, part.layer, part.component), ()):
            first = max(part.head_start, held.head_start)
            heads = min(part.head_start + part.head_count, held.head_start + held.head_count) - first
            if heads > 0:
                bytes_a_token = heads * part.head_dim * part.element_bytes
                # Weighted by tokens, so that groups of unlike blocks count by their bytes.
                total_bytes += bytes_a_token
                total_runs += bytes_a_token / _run_bytes(part, held, heads=heads, tokens=tokens)
    return total_bytes / total_runs if total_runs else 0.0


def _run_bytes(part: PartLayout, held: PartLayout, *, heads: int, tokens: int) -> int:
    """Grow a run from one element, axis by axis in the order of the target's strides, while both sides go on."""
    axes = sorted(
        [
            (part.dim_stride, held.dim_stride, part.head_dim),
            (part.head_stride, held.head_stride, heads),
            (part.token_stride, held.token_stride, tokens),
        ]
    )
    run = part.element_bytes
    for target_stride, source_stride, count in axes:
        if count == 1:
            continue
        if (target_stride, source_stride) != (run, run):
            break
        run *= count
    return run
