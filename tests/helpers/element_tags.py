"""A handoff between fleets inside one process: every element carries its global coordinate, and plans move them.

The reference places elements one coordinate at a time in NumPy and knows nothing of layouts or templates.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from helpers.conversions import converted
from helpers.fleets import Group, Key, Rank
from kvlink._native import Plan
from kvlink.layout import CacheLayout, KVCache, validate_layout
from kvlink.plan import as_delivered, compile_conversion, compile_template, select

Tables = dict[str, np.ndarray]
Coordinate = tuple[str, str, str, int]  # group, layer, component, head


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one request moves: a table a group, for the target and for each source."""

    num_tokens: int
    skip_tokens: int
    source_tables: list[Tables]
    target_tables: Tables


def check_handoff(sources: list[Rank], target: Rank, request: Request, rng: np.random.Generator) -> None:
    """Hand one request over, as each source's part of it, and compare every byte of the target's memory."""
    seed = int(rng.integers(0, 1 << 62))
    taken = select([rank.cache.layout for rank in sources], target.cache.layout, seed=seed, converts=target.converts)
    assert coordinates_of(taken) == coordinates_of([target.cache.layout])
    assert all(layout.groups == target.cache.layout.groups for layout in taken)
    if len(sources) == 1:
        assert taken == [target.cache.layout]
    delivered = [as_delivered(rank.cache.layout, layout) for rank, layout in zip(sources, taken, strict=True)]
    plans = [
        plan_of(rank, layout, request, tables)
        for rank, layout, tables in zip(sources, delivered, request.source_tables, strict=True)
    ]
    for layout, (_, plan) in zip(taken, plans, strict=True):
        assert named_by(plan) == tokens_taken(layout, target, request)
    fill_sources(sources, request)
    before = [backing.copy() for backing in target.backings]
    placed = place_by_reference(target, request, {name: each for rank in sources for name, each in rank.groups.items()})
    expected = [backing.copy() for backing in target.backings]
    for backing, old in zip(target.backings, before, strict=True):
        backing[...] = old
    assert sum(plan.total_bytes for _, plan in plans) == placed
    way = str(rng.choice(["direct", "packed", "one sided"], p=[0.6, 0.2, 0.2]))
    for source, layout, arriving, (template, plan) in zip(sources, taken, delivered, plans, strict=True):
        if not layout.parts:
            assert plan.total_bytes == 0
            continue
        if way != "direct":
            validate_layout(arriving)
        cuts = rng.integers(0, 1 << 20, int(rng.integers(0, 4))).tolist()
        intos = memory_of(target.cache)
        conversion = compile_conversion(arriving, layout)
        if conversion is None:
            move(template, plan, source, intos, way=way, cuts=cuts)
            continue
        intos.append(np.full(conversion.scratch_bytes, 0xA5, np.uint8))
        first, second = conversion.steps(template, plan)
        move(template, first, source, intos, way=way, cuts=cuts)
        conversion.run(second, [(region.ctypes.data, region.nbytes) for region in intos])
    for backing, wanted in zip(target.backings, expected, strict=True):
        assert backing.tobytes() == wanted.tobytes()


def coordinates_of(layouts: Sequence[CacheLayout]) -> Counter[Coordinate]:
    """How often each (group, layer, component, head) is there."""
    return Counter(
        (part.group, part.layer, part.component, head)
        for layout in layouts
        for part in layout.parts
        for head in range(part.head_start, part.head_start + part.head_count)
    )


def named_by(plan: Plan) -> dict[Coordinate, list[int]]:
    """The tokens of each (group, layer, component, head) that would be named if nothing of this plan arrived."""
    named: dict[Coordinate, list[int]] = {}
    for group, layer, component, first_head, end_head, first, end in plan.describe(0, plan.total_bytes):
        for head in range(first_head, end_head):
            named.setdefault((group, layer, component, head), []).extend(range(first, end))
    return named


def tokens_taken(layout: CacheLayout, target: Rank, request: Request) -> dict[Coordinate, list[int]]:
    """The same of what is taken from one source; slots count as token 0, however many there are."""
    wanted = {}
    for name, group in target.groups.items():
        tokens = wanted_tokens(
            group, request.target_tables[name], skip_tokens=request.skip_tokens, num_tokens=request.num_tokens
        )
        wanted[name] = [0][: len(tokens)] if group.slots else tokens.tolist()
    return {coordinate: wanted[coordinate[0]] for coordinate in coordinates_of([layout]) if wanted[coordinate[0]]}


def wanted_tokens(group: Group, table: np.ndarray, *, skip_tokens: int, num_tokens: int) -> np.ndarray:
    """The tokens that a target with this table wants; for slots, the entries of the table."""
    if group.slots:
        return np.flatnonzero(table >= 0)
    first = max(skip_tokens, num_tokens - group.window) if group.window else skip_tokens
    tokens = np.arange(first, max(first, num_tokens))
    return tokens[table[tokens // group.block_tokens] >= 0]


def fill_sources(sources: Sequence[Rank], request: Request) -> None:
    """Write the tag of its coordinate into every element of the request that a source has a block for."""
    for rank, tables in zip(sources, request.source_tables, strict=True):
        for name, group in rank.groups.items():
            table = tables[name]
            tokens = np.arange(len(table) if group.slots else request.num_tokens)
            tokens = tokens[table[tokens // _tokens_of(group)] >= 0]
            place = table[tokens // _tokens_of(group)], tokens % _tokens_of(group)
            elements = _elements(group, tokens, rank.heads[name])
            for key, view in rank.views.items():
                if key[0] == name:
                    view[place] = _tags(key, group, elements)


def place_by_reference(target: Rank, request: Request, held: dict[str, Group]) -> int:
    """Write into the target what must arrive, and return how many bytes of its sources, which have `held`, that is."""
    placed = 0
    for name, group in target.groups.items():
        table = request.target_tables[name]
        tokens = wanted_tokens(group, table, skip_tokens=request.skip_tokens, num_tokens=request.num_tokens)
        place = table[tokens // _tokens_of(group)], tokens % _tokens_of(group)
        elements = _elements(group, tokens, target.heads[name])
        for key, view in target.views.items():
            if key[0] == name:
                tags = _tags(key, held[name], elements)
                pair = held[name].dtype_tag, group.dtype_tag
                view[place] = tags if pair[0] == pair[1] else converted(tags, pair)
                placed += tags.nbytes
    return placed


def plan_of(source: Rank, taken: CacheLayout, request: Request, tables: Tables) -> tuple[object, Plan]:
    """Return the template and the plan of what is taken from one source."""
    template = compile_template(source.cache.layout, taken)
    nothing = np.empty(0, np.int32)
    plan = Plan(
        template,
        [tables.get(name, nothing) for name in template.groups],
        [request.target_tables[name] for name in template.groups],
        first_token=request.skip_tokens,
        end_token=request.num_tokens,
    )
    return template, plan


def move(template: object, plan: Plan, source: Rank, intos: list[np.ndarray], *, way: str, cuts: Sequence[int]) -> None:
    """Execute a plan: from memory to memory, or through a packed stream that is cut at `cuts`."""
    froms = memory_of(source.cache)
    sender = Plan.one_sided(template, plan, "source") if way == "one sided" else plan
    receiver = Plan.one_sided(template, plan, "target") if way == "one sided" else plan
    edges = sorted({0, plan.total_bytes, *(cut % (plan.total_bytes + 1) for cut in cuts)})
    for begin, end in zip(edges, edges[1:], strict=False):
        if way == "direct":
            copy_rows(plan.copies(begin, end), froms, intos)
        else:
            packed = [np.zeros(end - begin, np.uint8)]
            copy_rows(sender.copies(begin, end, packed="target"), froms, packed)
            copy_rows(receiver.copies(begin, end, packed="source"), packed, intos)


def memory_of(cache: KVCache) -> list[np.ndarray]:
    """The bytes of each region."""
    return [np.frombuffer((ctypes.c_uint8 * r.nbytes).from_address(r.address), np.uint8) for r in cache.regions]


def copy_rows(rows: np.ndarray, froms: list[np.ndarray], intos: list[np.ndarray]) -> None:
    """Do what a lane does with the rows of `Plan.copies`. NumPy refuses one that leaves its region."""
    for row in rows.tolist():
        from_region, into_region, from_offset, into_offset, run, inner, outer, fi, ii, fo, io = row
        shape = (outer, inner, run)
        into = np.ndarray(shape, np.uint8, intos[into_region], into_offset, (io, ii, 1))
        into[...] = np.ndarray(shape, np.uint8, froms[from_region], from_offset, (fo, fi, 1))


def _tokens_of(group: Group) -> int:
    return 1 if group.slots else group.block_tokens


def _elements(group: Group, tokens: np.ndarray, heads: range) -> np.ndarray:
    """Return a number for each (token, head, dim)."""
    of_head = np.arange(heads.start, heads.stop)[:, None] * 512 + np.arange(group.dim)
    return (tokens[:, None, None] * (64 * 512) + of_head).view(np.uint64)


def _tags(key: Key, group: Group, elements: np.ndarray) -> np.ndarray:
    """Return what stands in `elements` of one component, unlike other coordinates as far as the dtype can tell."""
    mixed = elements ^ np.uint64(zlib.crc32(repr(key).encode()) << 20)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed >>= np.uint64(32)
    return mixed.astype(group.dtype)
