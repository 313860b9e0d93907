"""``kvlink demo --push``: how much of a transfer hides behind the prefill, if each layer goes once it is computed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvlink.demo import messages as m
from kvlink.demo.display import Display
from kvlink.demo.fleet import Fleet
from kvlink.demo.process import WorkerProcess
from kvlink.demo.rows import PushRow
from kvlink.demo.run import check_length
from kvlink.engines.base import blocks_for

__all__ = ["PushOptions", "push"]

_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """What to push. `threads` are those of each of the two workers."""

    model: Path
    prompts: tuple[str, ...]
    lane: str
    threads: int
    max_new_tokens: int
    repeat: int


@dataclass(slots=True, kw_only=True)
class _Way:
    """One prompt, pushed layer by layer or at once, and what was measured of it."""

    prompt: str
    by_layer: bool
    num_tokens: int
    prefill_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    arrived: m.Arrived | None = None


def push(options: PushOptions, display: Display) -> list[PushRow]:
    """Push each prompt both ways `repeat` times, in turn, and return a row for each.

    Raises
    ------
    KvlinkError
        What a worker failed with, or that one ended or fell silent.
    """
    with Fleet(threads=options.threads, display=display) as fleet:
        model = fleet.converted(options.model)
        prefill = fleet.start("pushing", "prefill", model)
        decode = fleet.start("pushing", "decode", model)
        ways = _open(fleet, [prefill, decode], options)
        for number in range(options.repeat + 1):  # The first warms up: pages, kernels, the connection.
            for way in ways if number % 2 else reversed(ways):
                _push_once(fleet, prefill, decode, way, options)
            if number == 0:
                for way in ways:
                    for measured in (way.prefill_s, way.exposed_s, way.total_s):
                        measured.clear()
        pairs = [(ways[index], ways[index + 1]) for index in range(0, len(ways), 2)]
        return [_row(way, at_once) for at_once, by_layer in pairs for way in (at_once, by_layer)]


def _open(fleet: Fleet, workers: Sequence[WorkerProcess], options: PushOptions) -> list[_Way]:
    """Make both pools, and return two ways for each prompt: at once, then layer by layer."""
    fleet.wait_for(m.Loaded, count=len(workers))
    workers[0].send(m.CountTokens(list(options.prompts)))
    tokens = fleet.wait_for(m.Counted, count=1)[0].tokens
    check_length(prompt_tokens=max(tokens), max_new_tokens=options.max_new_tokens, max_positions=fleet.max_positions)
    needed = blocks_for(max(tokens) + options.max_new_tokens, block_tokens=_BLOCK_TOKENS)
    for worker in workers:
        worker.send(m.OpenPool(num_blocks=needed, block_tokens=_BLOCK_TOKENS, decode_blocks={}))
    fleet.wait_for(m.Ready, count=len(workers))
    return [
        _Way(prompt=prompt, by_layer=by_layer, num_tokens=count)
        for prompt, count in zip(options.prompts, tokens, strict=True)
        for by_layer in (False, True)
    ]


def _push_once(fleet: Fleet, prefill: WorkerProcess, decode: WorkerProcess, way: _Way, options: PushOptions) -> None:
    decode.send(
        m.ReserveRoom(
            0,
            num_tokens=way.num_tokens,
            max_new_tokens=options.max_new_tokens,
            lane="" if options.lane == "auto" else options.lane,
        )
    )
    ticket = fleet.wait_for(m.Reserved, count=1)[0].ticket
    prefill.send(m.PushPrompt(0, prompt=way.prompt, ticket=ticket, by_layer=way.by_layer))
    committed: m.Committed | None = None
    arrived: m.Arrived | None = None
    while committed is None or arrived is None:
        match fleet.next()[1]:
            case m.Committed() as message:
                committed = message
            case m.Arrived() as message:
                arrived = message
            case _:
                pass
    exposed_s = arrived.arrived_at_s - committed.committed_at_s
    way.arrived = arrived
    way.prefill_s.append(committed.prefill_s)
    way.exposed_s.append(exposed_s)
    way.total_s.append(committed.prefill_s + exposed_s)


def _row(way: _Way, at_once: _Way) -> PushRow:
    arrived, other = way.arrived, at_once.arrived
    if arrived is None or other is None:
        raise AssertionError("a row before its measurement")
    saved_s = [other_s - own_s for own_s, other_s in zip(way.exposed_s, at_once.exposed_s, strict=True)]
    return PushRow(
        way="layer by layer" if way.by_layer else "at once",
        prompt_tokens=way.num_tokens,
        kv_bytes=arrived.kv_bytes,
        lane=arrived.lane,
        repeat=len(way.exposed_s),
        prefill_ms_median=_median_ms(way.prefill_s),
        exposed_ms_median=_median_ms(way.exposed_s),
        exposed_ms_min=min(way.exposed_s) * 1e3,
        exposed_ms_max=max(way.exposed_s) * 1e3,
        exposed_ratio_to_at_once=_median_ratio(way.exposed_s, at_once.exposed_s),
        total_ratio_to_at_once=_median_ratio(way.total_s, at_once.total_s),
        saved_ms_median=_median_ms(saved_s),
        same_tokens=arrived.tokens == other.tokens,
    )


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def _median_ratio(own: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(left / right for left, right in zip(own, other, strict=True))
