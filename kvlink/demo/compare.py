"""``kvlink demo --compare``: how long others wait for their next token when a long document arrives.

Three ways with the same number of threads: one worker that prefills it at once, one that prefills it in chunks between
decode steps, and two workers of which one prefills and the other decodes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvlink.demo import messages as m
from kvlink.demo.display import Display
from kvlink.demo.fleet import Fleet
from kvlink.demo.process import WorkerProcess
from kvlink.demo.rows import CompareRow
from kvlink.demo.run import check_length
from kvlink.engines.base import blocks_for
from kvlink.errors import ConfigError

__all__ = ["CompareOptions", "compare", "default_threads", "longest_stall"]

_BLOCK_TOKENS = 16
# The others decode so many tokens before the document arrives, and it so many before the repetition ends.
_STEADY_TOKENS = 6
_DOCUMENT_TOKENS = 4
# More than any of the others says while a document is prefilled.
_MOST_NEW_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What to compare. `threads` is the sum over the workers of each way."""

    model: Path
    document: str
    others: tuple[str, ...]
    lane: str
    threads: int
    chunk_tokens: int
    repeat: int


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What was said in one repetition of one way, by request."""

    said: dict[int, list[m.Said]] = field(default_factory=dict)

    def count(self, request: int) -> int:
        return len(self.said.get(request, ()))

    def times(self, request: int) -> list[float]:
        return [each.at_s for each in self.said[request]]

    def tokens(self, request: int) -> list[int]:
        return [each.token for each in self.said[request]]


@dataclass(slots=True, kw_only=True)
class _Way:
    name: str
    decoder: WorkerProcess
    prefiller: WorkerProcess | None
    threads: list[int]
    chunk_tokens: int
    stalls_s: list[float] = field(default_factory=list)
    usual_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    pulls_s: list[float] = field(default_factory=list)
    lane: str = ""
    tokens: list[list[int]] = field(default_factory=list)


def longest_stall(times: Sequence[float], *, begin: float, end: float) -> float:
    """Return the longest time between two neighbours of `times`, as far as it lies within ``[begin, end]``."""
    stalls = [
        min(later, end) - max(earlier, begin)
        for earlier, later in zip(times, [*times[1:], end], strict=True)
        if later > begin and earlier < end
    ]
    return max(stalls, default=0.0)


def compare(options: CompareOptions, display: Display) -> list[CompareRow]:
    """Run every way `repeat` times, in turn, and return a row for each.

    Raises
    ------
    KvlinkError
        What a worker failed with, or that one ended or fell silent.
    """
    with Fleet(threads=options.threads, display=display) as fleet:
        return _Comparison(options, fleet).run()


class _Comparison:
    def __init__(self, options: CompareOptions, fleet: Fleet) -> None:
        self._options = options
        self._fleet = fleet
        self._document = len(options.others)  # its number as a request
        self._document_tokens = 0
        self._most_new_tokens = _MOST_NEW_TOKENS

    def run(self) -> list[CompareRow]:
        model = self._fleet.converted(self._options.model)
        half = max(1, self._options.threads // 2)
        rest = max(1, self._options.threads - half)
        shared = self._fleet.start("serving", "shared", model, threads=self._options.threads)
        prefill = self._fleet.start("serving", "prefill", model, threads=half)
        decode = self._fleet.start("serving", "decode", model, threads=rest)
        whole = [self._options.threads]
        ways = [
            _Way(name="shared", decoder=shared, prefiller=None, threads=whole, chunk_tokens=0),
            _Way(
                name="shared, chunked",
                decoder=shared,
                prefiller=None,
                threads=whole,
                chunk_tokens=self._options.chunk_tokens,
            ),
            _Way(name="split", decoder=decode, prefiller=prefill, threads=[half, rest], chunk_tokens=0),
        ]
        self._open([shared, prefill, decode])
        self._repeat(ways, times=1)  # Warms up: pages, kernels, the connection.
        for way in ways:
            for measured in (way.stalls_s, way.usual_s, way.ttfts_s, way.pulls_s, way.tokens):
                measured.clear()
        self._repeat(ways, times=self._options.repeat)
        return [self._row(way, ways[0]) for way in ways]

    def _open(self, workers: list[WorkerProcess]) -> None:
        self._fleet.wait_for(m.Loaded, count=len(workers))
        workers[0].send(m.CountTokens([self._options.document, *self._options.others]))
        tokens = self._fleet.wait_for(m.Counted, count=1)[0].tokens
        self._document_tokens = tokens[0]
        longest = self._fleet.max_positions
        check_length(prompt_tokens=max(tokens), max_new_tokens=_DOCUMENT_TOKENS, max_positions=longest)
        self._most_new_tokens = min(_MOST_NEW_TOKENS, longest - max(tokens[1:]))
        needed = sum(blocks_for(count + self._most_new_tokens, block_tokens=_BLOCK_TOKENS) for count in tokens)
        for worker in workers:
            worker.send(m.OpenPool(num_blocks=needed, block_tokens=_BLOCK_TOKENS, decode_blocks={}))
        self._fleet.wait_for(m.Ready, count=len(workers))

    def _repeat(self, ways: list[_Way], *, times: int) -> None:
        for number in range(times):
            # In turn, and each way first as often as the others: the machine may be slower at times.
            for index in range(len(ways)):
                self._measure(ways[(number + index) % len(ways)])

    def _measure(self, way: _Way) -> None:
        seen = _Seen()
        for request, prompt in enumerate(self._options.others):
            way.decoder.send(
                m.Join(request, prompt=prompt, chunk_tokens=way.chunk_tokens, max_new_tokens=self._most_new_tokens)
            )
        others = range(self._document)
        self._listen(way, seen, until=lambda: all(seen.count(other) >= _STEADY_TOKENS for other in others))
        begin = time.monotonic()
        usual = [later - earlier for other in others for earlier, later in _neighbours(seen.times(other))]
        if way.prefiller is not None:
            way.prefiller.send(m.HandOver(self._document, prompt=self._options.document))
        else:
            way.decoder.send(
                m.Join(
                    self._document,
                    prompt=self._options.document,
                    chunk_tokens=way.chunk_tokens,
                    max_new_tokens=_DOCUMENT_TOKENS,
                )
            )
        self._listen(way, seen, until=lambda: seen.count(self._document) >= _DOCUMENT_TOKENS)
        halted = [worker for worker in (way.decoder, way.prefiller) if worker is not None]
        for worker in halted:
            worker.send(m.Halt())
        if any(seen.count(other) >= self._most_new_tokens for other in others):
            raise ConfigError(
                f"compare: the others had said all {self._most_new_tokens} tokens that the model has room for before "
                "the document was prefilled; give a shorter one with --file"
            )
        document = seen.said[self._document]
        end = document[-1].at_s
        way.stalls_s.append(max(longest_stall(seen.times(other), begin=begin, end=end) for other in others))
        way.usual_s.append(statistics.median(usual))
        way.ttfts_s.append(document[0].at_s - begin)
        if way.prefiller is not None:
            way.pulls_s.append(document[0].pull_s)
            way.lane = document[0].lane
        way.tokens = [seen.tokens(request) for request in (*others, self._document)]
        self._fleet.wait_for(m.Halted, count=len(halted))

    def _listen(self, way: _Way, seen: _Seen, *, until: Callable[[], bool]) -> None:
        while not until():
            _, message = self._fleet.next()
            if isinstance(message, m.Said):
                seen.said.setdefault(message.request, []).append(message)
            elif isinstance(message, m.TicketMade):
                way.decoder.send(
                    m.Adopt(
                        message.request,
                        ticket=message.ticket,
                        lane="" if self._options.lane == "auto" else self._options.lane,
                        max_new_tokens=_DOCUMENT_TOKENS,
                    )
                )

    def _row(self, way: _Way, shared: _Way) -> CompareRow:
        same = [
            # As far as both go: what others have said by the end depends on how fast they were.
            all(left == right for left, right in zip(one, another, strict=False))
            for one, another in zip(way.tokens, shared.tokens, strict=True)
        ]
        ratios = [stall / base for stall, base in zip(way.stalls_s, shared.stalls_s, strict=True)]
        return CompareRow(
            way=way.name,
            threads=way.threads,
            others=self._document,
            document_tokens=self._document_tokens,
            chunk_tokens=way.chunk_tokens or None,
            repeat=len(way.stalls_s),
            stall_ms_median=_median_ms(way.stalls_s),
            stall_ms_min=min(way.stalls_s) * 1e3,
            stall_ms_max=max(way.stalls_s) * 1e3,
            usual_ms_median=_median_ms(way.usual_s),
            document_ttft_ms_median=_median_ms(way.ttfts_s),
            handoff_ms_median=_median_ms(way.pulls_s) if way.pulls_s else None,
            lane=way.lane,
            ratio_to_shared=statistics.median(ratios),
            same_tokens=all(same),
        )


def _neighbours(times: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(times[:-1], times[1:], strict=True))


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def default_threads() -> int:
    """Return threads of one way: at least two, since a way of two workers has one each."""
    return max(2, min(8, len(os.sched_getaffinity(0))))
