"""Pushes of the vLLM connector: layer by layer while the prompt is computed, in whatever order the two sides come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from helpers.late_imports import import_late
from helpers.vllm_halves import LAYERS, Engine, prompt, rest
from helpers.vllm_shapes import Request, Status

from kvlink.engines.vllm.params import Meeting
from kvlink.errors import TicketInvalid

torch = import_late("torch")

PREFILL_BLOCKS, DECODE_BLOCKS = [3, 1, 4], [5, 2, 6]
HOOKS = pytest.mark.parametrize("hooks", [LAYERS, LAYERS[:1], []], ids=["hooks", "one-hook", "no-hooks"])


class Pair:
    """A prefill and a decode engine, and a router that has sent both their request at once."""

    def __init__(self, **settings: Any) -> None:
        whole = settings.pop("whole", False)
        settings = {"push": True, "push_threshold_tokens": 0, "deadline_s": 10, **settings}
        self.prefill = Engine("p", whole=whole, **settings)
        self.decode = Engine("d", whole=whole, **settings)
        host, _, port = self.prefill.workers[0].node.address.rpartition(":")
        meeting = {"transfer_id": "room-17"}
        self.asked = Request("p", prompt(), {"do_remote_decode": True, **meeting})
        there = {"remote_host": host, "remote_port": int(port)}
        self.wanted = Request("d", prompt(), {"do_remote_prefill": True, **meeting, **there})

    def arrive(self) -> None:
        self.prefill.scheduler.arrived(self.asked)
        self.prefill.step()

    def reserve(self, *, computed: int = 0) -> None:
        assert self.decode.admit(self.wanted, DECODE_BLOCKS, computed=computed) == 10 - computed
        self.decode.step()

    def compute(self, first: int, end: int, *, hooks: Sequence[str]) -> None:
        """One chunk of the prompt."""
        assert self.prefill.scheduler.pushing == {"p"}
        blocks = PREFILL_BLOCKS[: -(-end // 4)]
        self.prefill.fill(blocks)
        self.prefill.scheduler.scheduled("p", (tuple(blocks),), range(first, end))
        self.prefill.step(layers=hooks)

    def finish(self, status: Any = Status.FINISHED_LENGTH_CAPPED) -> Any:
        self.asked.status, self.asked.num_computed_tokens = status, 10
        kept, params = self.prefill.scheduler.finished(self.asked, [PREFILL_BLOCKS])
        assert kept
        return params

    def until(self, happened: Callable[[], bool]) -> None:
        limit = time.monotonic() + 20
        while not happened():
            assert time.monotonic() < limit, (self.prefill.told, self.decode.told)
            rest(self.prefill, self.decode)
            self.prefill.step()
            self.decode.step()

    def until_both_are_told(self) -> None:
        self.until(lambda: "p" in self.prefill.told[0].sent and "d" in self.decode.told[0].received)

    def met(self) -> bool:
        """Whether the push has begun."""
        return self.prefill.workers[0].node.counters()["pushes"] > 0

    def moved(self) -> int:
        return int(self.decode.workers[0].node.counters()["bytes_pulled"])

    def check_arrived(self) -> None:
        assert self.decode.workers[0].take_bad_blocks() == set()
        assert not self.decode.told[0].failed
        for one, other in zip(self.prefill.tensors[0], self.decode.tensors[0], strict=True):
            assert torch.equal(other[DECODE_BLOCKS[:2]], one[PREFILL_BLOCKS[:2]])
            assert torch.equal(other[DECODE_BLOCKS[2], :, :2], one[PREFILL_BLOCKS[2], :, :2])

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**settings: Any) -> Pair:
        made.append(Pair(**settings))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@HOOKS
@pytest.mark.parametrize("whole", [False, True], ids=["tokens", "whole-blocks"])
def test_what_is_computed_moves_before_the_prompt_is_through(
    make_pair: Callable[..., Pair], hooks: Sequence[str], whole: bool
) -> None:
    """In full CUDA graphs the layers' hooks are skipped: then a chunk goes when it is computed."""
    pair = make_pair(whole=whole)
    pair.arrive()
    pair.reserve()
    pair.until(pair.met)
    pair.compute(0, 6, hooks=hooks)
    tensors = pair.decode.tensors[0]
    pair.until(lambda: all(bool(tensor[DECODE_BLOCKS[0]].all()) for tensor in tensors))
    assert "d" not in pair.decode.told[0].received
    pair.compute(6, 10, hooks=hooks)
    params = pair.finish()
    assert (params["do_remote_prefill"], params["transfer_mode"]) == (False, "push")
    pair.until_both_are_told()
    pair.check_arrived()
    assert pair.decode.workers[0].take_tally()["pulls"][0][2] == 3


@HOOKS
@pytest.mark.parametrize("when", ["in the middle", "at the end"])
def test_decode_may_come_later(make_pair: Callable[..., Pair], hooks: Sequence[str], when: str) -> None:
    pair = make_pair()
    pair.arrive()
    pair.compute(0, 6, hooks=hooks)
    if when == "in the middle":
        pair.reserve()
        pair.until(pair.met)
    pair.compute(6, 10, hooks=hooks)
    pair.finish()
    if when == "at the end":
        pair.prefill.step()
        assert "p" not in pair.prefill.told[0].sent
        pair.reserve()
    pair.until_both_are_told()
    pair.check_arrived()


def test_decode_may_come_first_and_have_a_prefix(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.reserve(computed=4)
    pair.arrive()
    pair.until(pair.met)
    pair.compute(4, 10, hooks=LAYERS)  # prefill has a prefix, too
    pair.finish()
    pair.until_both_are_told()
    for tensor, source in zip(pair.decode.tensors[0], pair.prefill.tensors[0], strict=True):
        assert not tensor[DECODE_BLOCKS[0]].any()
        assert torch.equal(tensor[DECODE_BLOCKS[1]], source[PREFILL_BLOCKS[1]])


def test_short_prompts_move_once_they_are_computed(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(push_threshold_tokens=11)
    pair.arrive()
    pair.reserve()
    pair.until(pair.met)
    pair.compute(0, 6, hooks=LAYERS)
    pair.compute(6, 10, hooks=LAYERS)
    pair.decode.step()
    assert not any(tensor.any() for tensor in pair.decode.tensors[0])
    pair.finish()
    pair.until_both_are_told()
    pair.check_arrived()


@pytest.mark.parametrize("met", ["before", "soon", "late"])
def test_an_aborted_prefill_ends_the_push_on_both_sides(make_pair: Callable[..., Pair], met: str) -> None:
    """Soon, unless decode comes when prefill has forgotten about it: see docs/engines/vllm.md."""
    pair = make_pair(deadline_s=0.5 if met == "late" else 60, retry_s=0.2 if met == "late" else 60)
    pair.arrive()
    if met == "before":
        pair.reserve()
        pair.until(pair.met)
    pair.compute(0, 6, hooks=LAYERS)
    assert pair.finish(Status.FINISHED_ABORTED) is None
    if met == "late":
        pair.until(lambda: "p" in pair.prefill.told[0].sent)
    if met != "before":
        pair.reserve()
    pair.until_both_are_told()
    assert pair.decode.workers[0].take_bad_blocks() == set(DECODE_BLOCKS)


def test_an_aborted_decode_gives_both_sides_their_blocks_back(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    pair.arrive()
    pair.reserve()
    pair.until(pair.met)
    pair.compute(0, 6, hooks=LAYERS)
    pair.wanted.status = Status.FINISHED_ABORTED
    assert pair.decode.scheduler.finished(pair.wanted, [DECODE_BLOCKS]) == (False, None)
    pair.until(lambda: "d" in pair.decode.told[0].received)
    assert "p" not in pair.prefill.told[0].sent  # vLLM must not hear of it before the request is over
    pair.compute(6, 10, hooks=LAYERS)
    pair.finish()
    pair.until(lambda: "p" in pair.prefill.told[0].sent)


def test_a_preempted_prefill_is_not_taken_for_what_it_was(make_pair: Callable[..., Pair]) -> None:
    """Its blocks are somebody else's by now."""
    pair = make_pair(deadline_s=60)
    pair.arrive()
    pair.reserve()
    pair.until(pair.met)
    pair.compute(0, 6, hooks=LAYERS)
    pair.prefill.scheduler.preempted("p")
    pair.until(lambda: "d" in pair.decode.told[0].received)
    assert pair.decode.workers[0].take_bad_blocks() == set(DECODE_BLOCKS)
    assert pair.prefill.scheduler.pushing == set()
    assert not pair.prefill.told[0].sent


@pytest.mark.parametrize("whole", [False, True], ids=["tokens", "whole-blocks"])
@pytest.mark.parametrize("aborted", [False, True])
def test_prefill_is_let_go_of_where_decode_wants_nothing(
    make_pair: Callable[..., Pair], aborted: bool, whole: bool
) -> None:
    """Since everything is there already, or since the request was aborted before it had blocks."""
    pair = make_pair(ttl_s=60, whole=whole)
    pair.arrive()
    if aborted:
        pair.wanted.status = Status.FINISHED_ABORTED
        assert pair.decode.scheduler.finished(pair.wanted, [[]]) == (False, None)
    else:
        pair.decode.scheduler.allocated(pair.wanted, (tuple(DECODE_BLOCKS),), 0)
    pair.until(pair.met)
    pair.compute(0, 10, hooks=LAYERS)
    pair.finish()
    pair.until(lambda: "p" in pair.prefill.told[0].sent)
    assert not pair.decode.told[0].received
    assert not any(tensor.any() for tensor in pair.decode.tensors[0])


def test_prefill_keeps_its_blocks_for_a_while_if_nobody_comes(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(ttl_s=0.2)
    pair.arrive()
    pair.compute(0, 10, hooks=LAYERS)
    pair.finish()
    pair.until(lambda: "p" in pair.prefill.told[0].sent)


def test_a_prefill_engine_that_is_not_there_fails_the_reservation_soon(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(deadline_s=60)
    pair.prefill.close()
    pair.reserve()
    pair.decode.until("received", "d")
    assert pair.decode.workers[0].take_bad_blocks() == set(DECODE_BLOCKS)


def test_two_prompts_under_one_id_are_not_taken_for_each_other(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(deadline_s=60)
    pair.asked = Request("p", prompt(9), pair.asked.kv_transfer_params)
    pair.arrive()
    pair.reserve()
    pair.until(lambda: "d" in pair.decode.told[0].received)
    assert pair.decode.workers[0].take_bad_blocks() == set(DECODE_BLOCKS)


def test_nothing_is_pushed_where_it_is_not_asked_for(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(push=False)
    pair.arrive()
    assert pair.prefill.scheduler.pushing == set()
    assert pair.decode.admit(pair.wanted, DECODE_BLOCKS) == 0
    pushing = make_pair()
    pushing.asked.kv_transfer_params = {"do_remote_decode": True}
    pushing.arrive()
    assert pushing.prefill.scheduler.pushing == set()
    windowed = Engine("w", window=5, push=True)
    windowed.scheduler.arrived(Request("p", prompt(), {"do_remote_decode": True, "transfer_id": "x"}))
    assert windowed.scheduler.pushing == set()
    windowed.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"transfer_id": ""}, "printable text of 1 to 200"),
        ({"transfer_id": 7}, "printable text"),
        ({"transfer_id": "x" * 201}, "printable text"),
        ({"remote_port": "7000"}, "needs the address"),
        ({"remote_host": None}, "needs the address"),
        ({"remote_port": 70000}, "outside"),
    ],
)
def test_a_meeting_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    params = {"do_remote_prefill": True, "transfer_id": "room", "remote_host": "10.0.0.4", "remote_port": 7000}
    assert Meeting.of(params) == Meeting(transfer_id="room", address="10.0.0.4:7000")
    with pytest.raises(TicketInvalid, match=said):
        Meeting.of({**params, **change})
