"""What the demo's parent and its workers say to each other, one line of JSON a message.

A decode worker is sent ``Start``, ``OpenPool``, ``Decode`` and nothing else: a ticket and the limits of the
generation, never a prompt. The first token reaches it in the payload of the handoff.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "Adopt",
    "Answer",
    "Answered",
    "Arrived",
    "Committed",
    "Converted",
    "Counted",
    "CountTokens",
    "Decode",
    "Decoded",
    "Failed",
    "FromWorker",
    "Generate",
    "HandOver",
    "Halt",
    "Halted",
    "HandoffName",
    "Join",
    "Loaded",
    "Offered",
    "OpenPool",
    "Prefill",
    "Prefilled",
    "Pulled",
    "Ready",
    "PushPrompt",
    "Released",
    "ReserveRoom",
    "Reserved",
    "Said",
    "Stage",
    "Start",
    "ToWorker",
    "TicketMade",
    "Token",
]


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message to every worker: what to be, and which model to load."""

    role: str
    name: str
    model: str
    threads: int


class CountTokens(msgspec.Struct, frozen=True, tag=True):
    """To a prefill worker: how long are these prompts? The pools are sized by the answer."""

    prompts: list[str]


class OpenPool(msgspec.Struct, frozen=True, tag=True):
    """To prefill and decode workers: make this many blocks and a node over them.

    `decode_blocks` tells a prefill worker's scheduler how many blocks of each decode worker it
    may give out.
    """

    num_blocks: int
    block_tokens: int
    decode_blocks: dict[str, int]


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """To a prefill worker: compute the KV of a prompt and hand it over so many times."""

    request: int
    prompt: str
    max_new_tokens: int
    handoffs: int


class HandoffName(msgspec.Struct, frozen=True):
    """Which request, and which of the times that it is handed over, counted from 0."""

    request: int
    round: int


class Answered(msgspec.Struct, frozen=True, tag=True):
    """To a prefill worker: the decode worker is done with this handoff."""

    handoff: HandoffName


class Decode(msgspec.Struct, frozen=True, tag=True):
    """To a decode worker: pull what `ticket` offers, on the first usable of `lanes`, and decode.

    No lanes: the node picks one. `corrupt` damages one block between the pull and the decode.
    """

    handoff: HandoffName
    ticket: dict[str, Any]
    lanes: list[str]
    max_new_tokens: int
    corrupt: bool


class Generate(msgspec.Struct, frozen=True, tag=True):
    """To the reference: answer `prompt` with stock ``generate``."""

    request: int
    prompt: str
    max_new_tokens: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """To a serving worker: prefill a prompt, `chunk_tokens` at a time between decode steps, then decode it as well."""

    request: int
    prompt: str
    chunk_tokens: int
    max_new_tokens: int


class HandOver(msgspec.Struct, frozen=True, tag=True):
    """To a serving worker: prefill a prompt and offer it to another."""

    request: int
    prompt: str


class Adopt(msgspec.Struct, frozen=True, tag=True):
    """To a serving worker: pull what `ticket` offers while the others decode, then decode it with them."""

    request: int
    ticket: dict[str, Any]
    lane: str
    max_new_tokens: int


class ReserveRoom(msgspec.Struct, frozen=True, tag=True):
    """To a pushing worker that decodes: reserve blocks for a request, and answer it once they are filled."""

    request: int
    num_tokens: int
    max_new_tokens: int
    lane: str


class PushPrompt(msgspec.Struct, frozen=True, tag=True):
    """To a pushing worker that prefills: push a prompt's KV into what `ticket` reserves, layer by layer or at once."""

    request: int
    prompt: str
    ticket: dict[str, Any]
    by_layer: bool


class Halt(msgspec.Struct, frozen=True, tag=True):
    """To a serving worker: end all requests."""


class Stage(msgspec.Struct, frozen=True, tag=True):
    """From any worker: what it is busy with, for the progress display."""

    text: str


class Converted(msgspec.Struct, frozen=True, tag=True):
    """From the converter: the model's directory is there."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """From any worker: the model is in memory."""

    pid: int
    max_positions: int


class Counted(msgspec.Struct, frozen=True, tag=True):
    """From a prefill worker: the length of each prompt, in tokens."""

    tokens: list[int]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From prefill and decode workers: the node is up."""


class Prefilled(msgspec.Struct, frozen=True, tag=True):
    """From a prefill worker: the KV of a request is in its blocks."""

    request: int
    prompt_tokens: int
    prefill_s: float


class Offered(msgspec.Struct, frozen=True, tag=True):
    """From a prefill worker: carry this ticket to that decode worker.

    `offer_s` is how long making the offer took; `offered_at_s` is on the host's monotonic clock,
    which all processes share.
    """

    handoff: HandoffName
    decode_worker: str
    ticket: dict[str, Any]
    offer_s: float
    offered_at_s: float


class Released(msgspec.Struct, frozen=True, tag=True):
    """From a prefill worker: the blocks of a request are free again."""

    request: int


class Pulled(msgspec.Struct, frozen=True, tag=True):
    """From a decode worker: the KV arrived. `pull_s` counts from the call to the outcome."""

    handoff: HandoffName
    lane: str
    kv_bytes: int
    pulled_at_s: float
    pull_s: float
    phases_s: dict[str, float]
    corrupted_block: int | None


class Token(msgspec.Struct, frozen=True, tag=True):
    """From a decode worker: the next token, and the text that it completes."""

    handoff: HandoffName
    token: int
    text: str


class Decoded(msgspec.Struct, frozen=True, tag=True):
    """From a decode worker: the answer is complete.

    `forward_tokens` says how many tokens each forward took. `first_step_s` is the time of the
    first forward and `decode_s` that of all.
    """

    handoff: HandoffName
    tokens: list[int]
    text: str
    forward_tokens: list[int]
    first_step_s: float
    decode_s: float


class TicketMade(msgspec.Struct, frozen=True, tag=True):
    """From a serving worker: the prefill of a request is done, and offered under this ticket."""

    request: int
    ticket: dict[str, Any]


class Said(msgspec.Struct, frozen=True, tag=True):
    """From a serving worker: the next token of a request, at a time of the monotonic clock of the host.

    The first one of a request that was handed over says how: `lane` and `pull_s`, from the call to the outcome.
    """

    request: int
    token: int
    at_s: float
    lane: str = ""
    pull_s: float = 0.0


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """From a pushing worker: blocks are reserved under this ticket."""

    request: int
    ticket: dict[str, Any]


class Committed(msgspec.Struct, frozen=True, tag=True):
    """From a pushing worker: prefill ended at this time, of the host's monotonic clock, and the push has succeeded."""

    request: int
    prefill_s: float
    committed_at_s: float


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """From a pushing worker: all was there at this time of the same clock; and what it decoded from that."""

    request: int
    arrived_at_s: float
    lane: str
    kv_bytes: int
    tokens: list[int]


class Halted(msgspec.Struct, frozen=True, tag=True):
    """From a serving worker: no request is left, and no block is taken."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """From the reference: what stock ``generate`` answers."""

    request: int
    prompt_tokens: int
    tokens: list[int]
    text: str
    generate_s: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From any worker, and its last: the class name and the message of what went wrong."""

    error: str
    message: str


ToWorker = (
    Start
    | CountTokens
    | OpenPool
    | Prefill
    | Answered
    | Decode
    | Generate
    | Join
    | HandOver
    | Adopt
    | ReserveRoom
    | PushPrompt
    | Halt
)
FromWorker = (
    Stage
    | Converted
    | Loaded
    | Counted
    | Ready
    | Prefilled
    | Offered
    | Released
    | Pulled
    | Token
    | Decoded
    | TicketMade
    | Said
    | Halted
    | Reserved
    | Committed
    | Arrived
    | Answer
    | Failed
)
