"""What the demo reports, a row of its tables and of the JSON each: a handoff, or a way of serving."""

from __future__ import annotations

from typing import TypedDict

from kvlink.demo.messages import Answer, Decoded, Offered, Prefilled, Pulled

__all__ = ["CompareRow", "PushRow", "Row", "describe_difference", "first_difference", "make_row"]


class Row(TypedDict):
    """Everything measured about one handoff. Times are seconds; GB is 10^9 bytes.

    ``ttft_s``, the time to the first token that the decode worker computes, is the sum of
    ``prefill_s``, ``handoff_s`` (making the offer, and the pull from call to outcome) and
    ``first_step_s``. ``queued_s`` apart from it is how long the ticket waited for a free decode worker.
    """

    request: int
    prefill_worker: str
    decode_worker: str
    lane_requested: str
    lane: str
    prompt_tokens: int
    new_tokens: int
    kv_bytes: int
    transfer_s: float
    transfer_gbps: float
    phases_s: dict[str, float]
    ttft_s: float
    prefill_s: float
    handoff_s: float
    first_step_s: float
    queued_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    decode_forwards: int
    decode_forward_tokens: list[int]
    every_decode_forward_took_one_token: bool
    tokens: list[int]
    reference_tokens: list[int]
    same_tokens: bool
    first_difference: int | None
    corrupted_block: int | None
    text: str


class PushRow(TypedDict):
    """One way of pushing one prompt. Medians over the repetitions; milliseconds.

    Exposed is the time from the end of the prefill until everything is in the decode worker; saved is how much less
    of it there is than at once, and ``total`` counts the prefill, too. ``same_tokens``: as decoded after the other way.
    """

    way: str
    prompt_tokens: int
    kv_bytes: int
    lane: str
    repeat: int
    prefill_ms_median: float
    exposed_ms_median: float
    exposed_ms_min: float
    exposed_ms_max: float
    exposed_ratio_to_at_once: float
    total_ratio_to_at_once: float
    saved_ms_median: float
    same_tokens: bool


class CompareRow(TypedDict):
    """One way of serving. Medians over the repetitions; milliseconds.

    A stall is the longest time between two tokens of any of the others from the arrival of the document until its
    fourth token; ``usual_ms`` is their median time between tokens before. ``same_tokens``: as in the first way.
    """

    way: str
    threads: list[int]
    others: int
    document_tokens: int
    chunk_tokens: int | None
    repeat: int
    stall_ms_median: float
    stall_ms_min: float
    stall_ms_max: float
    usual_ms_median: float
    document_ttft_ms_median: float
    handoff_ms_median: float | None
    lane: str
    ratio_to_shared: float
    same_tokens: bool


def first_difference(tokens: list[int], reference: list[int]) -> int | None:
    """Return the first index at which the two differ, or one of them has ended; None if they are the same."""
    for index, (left, right) in enumerate(zip(tokens, reference, strict=False)):
        if left != right:
            return index
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


def describe_difference(row: Row) -> str:
    """Say where an answer left the reference, and which block was damaged if one was."""
    damage = "no block" if row["corrupted_block"] is None else f"block {row['corrupted_block']}"
    index = row["first_difference"] or 0
    got, expected = (_token_at(index, tokens) for tokens in (row["tokens"], row["reference_tokens"]))
    return (
        f"request {row['request']} on {row['lane']}, {damage} damaged: the first differing token is "
        f"number {index}, {got} in place of {expected}"
    )


def make_row(
    *,
    prefill_worker: str,
    lane_requested: str,
    prefilled: Prefilled,
    offered: Offered,
    pulled: Pulled,
    decoded: Decoded,
    answer: Answer,
) -> Row:
    """Put together what prefill, decode and reference say about one handoff."""
    transfer_s = pulled.phases_s.get("move", 0.0)
    handoff_s = offered.offer_s + pulled.pull_s
    difference = first_difference(decoded.tokens, answer.tokens)
    return Row(
        request=prefilled.request,
        prefill_worker=prefill_worker,
        decode_worker=offered.decode_worker,
        lane_requested=lane_requested,
        lane=pulled.lane,
        prompt_tokens=prefilled.prompt_tokens,
        new_tokens=len(decoded.tokens),
        kv_bytes=pulled.kv_bytes,
        transfer_s=transfer_s,
        transfer_gbps=_rate(pulled.kv_bytes / 1e9, transfer_s),
        phases_s=pulled.phases_s,
        ttft_s=prefilled.prefill_s + handoff_s + decoded.first_step_s,
        prefill_s=prefilled.prefill_s,
        handoff_s=handoff_s,
        first_step_s=decoded.first_step_s,
        queued_s=max(0.0, pulled.pulled_at_s - offered.offered_at_s),
        prefill_tokens_per_s=_rate(prefilled.prompt_tokens, prefilled.prefill_s),
        decode_tokens_per_s=_rate(len(decoded.forward_tokens), decoded.decode_s),
        decode_forwards=len(decoded.forward_tokens),
        decode_forward_tokens=decoded.forward_tokens,
        every_decode_forward_took_one_token=set(decoded.forward_tokens) <= {1},
        tokens=decoded.tokens,
        reference_tokens=answer.tokens,
        same_tokens=difference is None,
        first_difference=difference,
        corrupted_block=pulled.corrupted_block,
        text=decoded.text,
    )


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _token_at(index: int, tokens: list[int]) -> str:
    return str(tokens[index]) if index < len(tokens) else "the end"
