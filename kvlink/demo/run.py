"""One run of the demo: starts the workers, carries tickets from prefill to decode, collects the rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from kvlink.demo import messages as m
from kvlink.demo.display import Display
from kvlink.demo.fleet import Fleet
from kvlink.demo.process import WorkerProcess
from kvlink.demo.rows import Row, make_row
from kvlink.engines.base import blocks_for
from kvlink.errors import ConfigError

__all__ = ["DemoOptions", "DemoRun", "check_length"]

_BLOCK_TOKENS = 16
# Requests of one prefill worker that a decode worker keeps room for: one to decode, one to pull.
_REQUESTS_PER_DECODE_WORKER = 2
# Prompts that a prefill worker is sent before it is done with the first: it must not wait for the parent.
_PROMPTS_PER_PREFILL_WORKER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What to run.

    `model` is a GGUF file to convert, or a directory. `lanes` has an entry for each time that a
    request is handed over: lanes to require, the first usable one wins; empty leaves it to the node.
    """

    model: Path
    prompts: tuple[str, ...]
    prefill_count: int
    decode_count: int
    lanes: tuple[tuple[str, ...], ...]
    max_new_tokens: int
    corrupt: bool
    threads: int


@dataclass(slots=True, kw_only=True)
class _Request:
    """What the workers have said about one request so far; `offered` and `pulled` are of its last handoff."""

    prompt: str
    answer: m.Answer | None = None
    prefill_worker: str = ""
    prefilled: m.Prefilled | None = None
    offered: m.Offered | None = None
    pulled: m.Pulled | None = None


@dataclass(slots=True, kw_only=True)
class _PrefillWorker:
    process: WorkerProcess
    requests: set[int] = field(default_factory=set)


class DemoRun:
    """Owns the worker processes of one run; a context manager, so that none outlives it."""

    def __init__(self, options: DemoOptions, display: Display) -> None:
        self._options = options
        self._display = display
        self._fleet = Fleet(threads=options.threads, display=display)
        self._prefill: dict[str, _PrefillWorker] = {}
        self._decode: dict[str, WorkerProcess] = {}
        self._requests = [_Request(prompt=prompt) for prompt in options.prompts]
        self._to_prefill = deque(range(len(self._requests)))
        self._rows: list[Row] = []
        self._num_ready = 0

    def __enter__(self) -> DemoRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fleet.__exit__(kind, error, trace)

    def run(self) -> list[Row]:
        """Run it all and return a row for each handoff.

        Raises
        ------
        KvlinkError
            What a worker failed with, or that one ended or fell silent.
        """
        self._start_workers(self._fleet.converted(self._options.model))
        while not self._is_loaded():
            self._handle_next()
        self._display.begin_answers(self._options)
        while len(self._rows) < len(self._requests) * len(self._options.lanes):
            self._send_prompts()
            self._handle_next()
        return sorted(self._rows, key=lambda row: row["request"])

    def _start_workers(self, model: Path) -> None:
        """Start all. The reference answers while the others load: nothing is timed before all are ready."""
        reference = self._fleet.start("reference", "reference", model)
        for index, request in enumerate(self._requests):
            reference.send(m.Generate(index, prompt=request.prompt, max_new_tokens=self._options.max_new_tokens))
        for index in range(self._options.prefill_count):
            name = f"prefill-{index}"
            self._prefill[name] = _PrefillWorker(process=self._fleet.start("prefill", name, model))
        for index in range(self._options.decode_count):
            name = f"decode-{index}"
            self._decode[name] = self._fleet.start("decode", name, model)
        first = next(iter(self._prefill.values()))
        first.process.send(m.CountTokens([request.prompt for request in self._requests]))

    def _is_loaded(self) -> bool:
        is_up = self._num_ready == len(self._prefill) + len(self._decode)
        return is_up and all(request.answer for request in self._requests)

    def _handle_next(self) -> None:
        worker, message = self._fleet.next()
        match message:
            case m.Stage() | m.Loaded():
                pass
            case m.Counted():
                self._open_pools(max(message.tokens))
            case m.Ready():
                self._num_ready += 1
            case m.Answer():
                self._requests[message.request].answer = message
                if all(request.answer for request in self._requests):
                    self._display.ready(worker.name)
            case _:
                self._handle_request(worker, message)

    def _handle_request(self, worker: WorkerProcess, message: m.FromWorker) -> None:
        match message:
            case m.Prefilled():
                self._requests[message.request].prefilled = message
                self._requests[message.request].prefill_worker = worker.name
            case m.Offered():
                self._requests[message.handoff.request].offered = message
                self._carry_ticket(message)
            case m.Pulled():
                self._requests[message.handoff.request].pulled = message
                self._display.pulled(message)
            case m.Token():
                self._display.token(message)
            case m.Decoded():
                self._finish_handoff(message)
            case m.Released():
                self._prefill[worker.name].requests.discard(message.request)
            case _:
                raise AssertionError(message)

    def _open_pools(self, prompt_tokens: int) -> None:
        """Let every worker make a pool: for one request to prefill, for the schedulers' shares to decode."""
        check_length(
            prompt_tokens=prompt_tokens,
            max_new_tokens=self._options.max_new_tokens,
            max_positions=self._fleet.max_positions,
        )
        needed = blocks_for(prompt_tokens + self._options.max_new_tokens, block_tokens=_BLOCK_TOKENS)
        share = _REQUESTS_PER_DECODE_WORKER * needed
        names = deque(self._decode)
        for worker in self._prefill.values():
            shares = dict.fromkeys(names, share)
            worker.process.send(m.OpenPool(num_blocks=needed, block_tokens=_BLOCK_TOKENS, decode_blocks=shares))
            names.rotate(-1)  # Schedulers that know nothing of each other must not all start with the same worker.
        for process in self._decode.values():
            num_blocks = share * len(self._prefill)
            process.send(m.OpenPool(num_blocks=num_blocks, block_tokens=_BLOCK_TOKENS, decode_blocks={}))

    def _send_prompts(self) -> None:
        """Give the next prompts to the prefill workers with the fewest."""
        while self._to_prefill:
            worker = min(self._prefill.values(), key=lambda worker: len(worker.requests))
            if len(worker.requests) >= _PROMPTS_PER_PREFILL_WORKER:
                return
            index = self._to_prefill.popleft()
            worker.requests.add(index)
            worker.process.send(
                m.Prefill(
                    index,
                    prompt=self._requests[index].prompt,
                    max_new_tokens=self._options.max_new_tokens,
                    handoffs=len(self._options.lanes),
                )
            )

    def _carry_ticket(self, offered: m.Offered) -> None:
        """Send a decode worker the ticket and the limits: nothing else of the request ever reaches it."""
        handoff = offered.handoff
        self._decode[offered.decode_worker].send(
            m.Decode(
                handoff,
                ticket=offered.ticket,
                lanes=list(self._options.lanes[handoff.round]),
                max_new_tokens=self._options.max_new_tokens,
                corrupt=self._options.corrupt and handoff == m.HandoffName(request=0, round=0),
            )
        )

    def _finish_handoff(self, decoded: m.Decoded) -> None:
        handoff = decoded.handoff
        request = self._requests[handoff.request]
        if not (request.prefilled and request.offered and request.pulled and request.answer):
            raise AssertionError(f"an answer to {handoff} before all that leads to it")
        row = make_row(
            prefill_worker=request.prefill_worker,
            lane_requested=" or ".join(self._options.lanes[handoff.round]) or "auto",
            prefilled=request.prefilled,
            offered=request.offered,
            pulled=request.pulled,
            decoded=decoded,
            answer=request.answer,
        )
        self._rows.append(row)
        self._display.decoded(row, is_first=handoff.round == 0)
        self._prefill[request.prefill_worker].process.send(m.Answered(handoff))


def check_length(*, prompt_tokens: int, max_new_tokens: int, max_positions: int) -> None:
    """Check that the model can take the longest request.

    Raises
    ------
    ConfigError
        If prompt and answer together are longer than the model was made for.
    """
    if prompt_tokens + max_new_tokens > max_positions:
        raise ConfigError(
            f"run the demo: a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones are more than the "
            f"{max_positions} that the model takes; shorten one of them"
        )
