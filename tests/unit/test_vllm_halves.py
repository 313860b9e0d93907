"""Both halves of the vLLM connector without vLLM: what its scheduler is told in each order in which requests end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.late_imports import import_late
from helpers.vllm_halves import Engine, prompt, rest
from helpers.vllm_shapes import Request, Status

import kvlink
from kvlink.commands import Event
from kvlink.engines.vllm import stats
from kvlink.engines.vllm.ledger import Ledger, Report
from kvlink.errors import AlreadyClaimed, Cancelled, InvalidArgument, PeerLost

torch = import_late("torch")


@pytest.fixture
def engines() -> Iterator[Any]:
    made: list[Engine] = []

    def make(name: str, **options: Any) -> Engine:
        made.append(Engine(name, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def asking(request_id: str = "p", length: int = 10, **more: Any) -> Request:
    return Request(request_id, prompt(length), {"do_remote_decode": True, **more})


@pytest.mark.parametrize(("from_ranks", "to_ranks"), [(1, 1), (1, 2), (2, 1)])
def test_a_prefill_is_handed_over_and_both_sides_hear_of_it_once(engines: Any, from_ranks: int, to_ranks: int) -> None:
    prefill, decode = engines("p", ranks=from_ranks), engines("d", ranks=to_ranks)
    params = prefill.prefill(asking(), [3, 1, 4], value=2)
    request = Request("d", prompt(), params)
    assert decode.admit(request, [5, 2, 6]) == 10
    decode.until("received", "d")
    prefill.until("sent", "p")
    assert not any(told.failed for told in decode.told.values())
    for tensors in decode.tensors:
        for layer, tensor in enumerate(tensors):
            for place, block in enumerate([5, 2]):
                assert (tensor[block] == 2001 + 100 * layer + place).all()
            assert (tensor[6, :, :2] == 2003 + 100 * layer).all()
            assert not tensor[6, :, 2:].any()
    # It comes once more, with zero external tokens; and vLLM may ask for it anew after a failure.
    decode.scheduler.allocated(request, ((5, 2, 6),), 0)
    assert decode.scheduler.matched(request, 0) == (0, False)
    decode.step()
    counts = decode.workers[0].take_tally()
    assert counts is not None
    ((seconds, moved, blocks, lane, phases),) = counts["pulls"]
    assert seconds > 0
    assert (moved > 0, blocks, bool(lane), "move" in phases) == (True, 3, True, True)


def test_a_prefix_that_is_here_already_is_left_alone(engines: Any) -> None:
    prefill, decode = engines("p"), engines("d")
    params = prefill.prefill(asking(), [3, 1, 4])
    assert decode.admit(Request("d", prompt(), params), [5, 2, 6], computed=8) == 2
    decode.until("received", "d")
    for tensor in decode.tensors[0]:
        assert not tensor[[5, 2]].any()
        assert tensor[6, :, :2].all()


def test_prefill_is_let_go_of_where_everything_is_here_already(engines: Any) -> None:
    prefill, decode = engines("p", ttl_s=60), engines("d", ranks=2)
    params = prefill.prefill(asking(length=8), [3, 1])
    assert decode.admit(Request("d", prompt(8), params), [5, 2], computed=8) == 0
    prefill_is_free(prefill, decode)
    assert all(told == Report() for told in decode.told.values())


def test_prefill_is_let_go_of_if_its_decode_was_aborted_before_it_had_blocks(engines: Any) -> None:
    prefill, decode = engines("p", ttl_s=60), engines("d")
    request = Request("d", prompt(), prefill.prefill(asking(), [3, 1, 4]))
    decode.scheduler.arrived(request)
    request.status = Status.FINISHED_ABORTED
    assert decode.scheduler.finished(request, [[]]) == (False, None)
    prefill_is_free(prefill, decode)
    assert decode.told[0] == Report()


def prefill_is_free(prefill: Engine, decode: Engine) -> None:
    limit = time.monotonic() + 20
    while "p" not in prefill.told[0].sent:
        assert time.monotonic() < limit
        rest(prefill, decode)
        decode.step()
        prefill.step()


def test_an_aborted_pull_is_told_too_and_prefill_is_let_go_of(engines: Any) -> None:
    prefill, decode = engines("p", ttl_s=60), engines("d")
    params = prefill.prefill(asking(), [3, 1, 4], step=False)  # so that the claim waits for an offer
    request = Request("d", prompt(), params)
    decode.admit(request, [5, 2, 6])
    decode.step()
    request.status = Status.FINISHED_ABORTED
    assert decode.scheduler.finished(request, [[5, 2, 6]]) == (False, None)
    decode.until("received", "d")
    assert decode.told[0].failed == set()  # its blocks are named instead
    assert decode.workers[0].take_bad_blocks() == {5, 2, 6}
    assert decode.workers[0].take_tally()["failed"] == {"Cancelled": 1}
    prefill_is_free(prefill, decode)


def test_a_lease_that_ended_fails_the_pull_with_exactly_its_blocks(engines: Any) -> None:
    prefill, decode = engines("p", ttl_s=0.05), engines("d")
    params = prefill.prefill(asking(), [3, 1, 4])
    prefill.until("sent", "p")
    assert prefill.workers[0].take_tally()["offers_failed"] == {"TicketExpired": 1}
    decode.admit(Request("d", prompt(), params), [5, 2, 6], computed=4)
    decode.until("received", "d")
    assert decode.workers[0].take_bad_blocks() == {2, 6}  # block 5 was here before
    assert decode.workers[0].take_bad_blocks() == set()
    assert not any(tensor.any() for tensor in decode.tensors[0])


def test_a_dead_prefill_engine_fails_the_pull_at_once(engines: Any) -> None:
    prefill, decode = engines("p"), engines("d")
    params = prefill.prefill(asking(), [3, 1, 4])
    prefill.step()
    prefill.close()
    decode.admit(Request("d", prompt(), params), [5, 2, 6])
    decode.until("received", "d")
    assert decode.workers[0].take_bad_blocks() == {5, 2, 6}
    assert set(decode.workers[0].take_tally()["failed"]) <= {"PeerUnreachable", "PeerLost"}


def test_a_node_that_takes_nothing_more_fails_what_it_is_told_and_vllm_goes_on(engines: Any) -> None:
    """A worker whose node refuses a batch, or everything while it is drained, reports what it was to do."""
    prefill, decode = engines("p"), engines("d")
    prefill.workers[0].node.drain(deadline_s=5)
    params = prefill.prefill(asking(), [3, 1, 4])
    prefill.until("sent", "p")
    assert prefill.workers[0].take_tally()["offers_failed"] == {"NotReady": 1}
    decode.workers[0].close()
    decode.admit(Request("d", prompt(), params), [5, 2, 6])
    decode.until("received", "d")
    assert decode.workers[0].take_tally()["failed"] == {"Closed": 1}


@pytest.mark.parametrize(("there", "here"), [(2, 1), (1, 2), (2, 2)])
def test_pipeline_stages_have_their_layers_put_together_and_taken_apart(engines: Any, there: int, here: int) -> None:
    prefill, decode = engines("p", stages=there), engines("d", stages=here)
    prefill.fill([3, 1, 4])
    for layer, tensors in enumerate(prefill.tensors):
        for tensor in tensors:
            tensor += 10 * layer  # another content in each stage
    request = asking()
    prefill.scheduler.arrived(request)
    request.num_computed_tokens, request.status = request.num_prompt_tokens, Status.FINISHED_LENGTH_CAPPED
    _, params = prefill.scheduler.finished(request, [[3, 1, 4]])
    prefill.step()
    assert decode.admit(Request("d", prompt(), params), [5, 2, 6]) == 10
    decode.until("received", "d")
    prefill.until("sent", "p")
    assert not any(told.failed for told in decode.told.values())
    sent = [tensor for tensors in prefill.tensors for tensor in tensors]
    came = [tensor for tensors in decode.tensors for tensor in tensors]
    for one, other in zip(sent, came, strict=True):
        assert torch.equal(other[[5, 2]], one[[3, 1]])
        assert torch.equal(other[6, :, :2], one[4, :, :2])


def test_whole_blocks_are_offered_where_tokens_cannot_be_told_apart(engines: Any) -> None:
    prefill, decode = engines("p", whole=True), engines("d", whole=True)
    params = prefill.prefill(asking(), [3, 1, 4])
    assert (params["remote_num_tokens"], params["kvlink"]["num_tokens"]) == (10, 12)
    assert decode.admit(Request("d", prompt(), params), [5, 2, 6]) == 10
    decode.until("received", "d")
    for one, other in zip(prefill.tensors[0], decode.tensors[0], strict=True):
        assert torch.equal(other[6], one[4])


def test_decode_computes_the_last_token_of_a_windowed_prompt_itself(engines: Any) -> None:
    """Prefill would let go of the oldest token that the last one sees, as soon as it has computed that."""
    prefill, decode = engines("p", window=5), engines("d", window=5)
    request = asking(length=10)
    params = prefill.prefill(request, [0, 1, 4])
    assert (request.num_prompt_tokens, request.max_tokens, len(request._all_token_ids)) == (9, 1, 9)
    prefill.scheduler.arrived(request)  # after a preemption
    assert request.num_prompt_tokens == 9
    assert params["remote_num_tokens"] == 9
    assert decode.admit(Request("d", prompt(10), params), [0, 2, 6]) == 9
    decode.until("received", "d")
    assert not any(told.failed for told in decode.told.values())
    # Tokens 4 to 8, which token 9 sees.
    assert all(tensor[2].all() and tensor[6, :, :1].all() for tensor in decode.tensors[0])


def test_a_prompt_is_computed_here_if_its_parameters_are_not_right(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decode = engines("d")
    request = Request("d", prompt(), {"do_remote_prefill": True, "remote_host": "10.0.0.4"})
    assert decode.admit(request, [5, 2, 6]) == 0
    assert "has no 'kvlink'" in caplog.text
    caplog.clear()
    assert decode.scheduler.take_causes() == {"TicketInvalid": 1}
    assert decode.scheduler.take_causes() == {}
    assert decode.scheduler.take_orders().receives == []


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.RUNNING])
def test_a_prefill_that_did_not_finish_is_not_kept(engines: Any, status: Any) -> None:
    prefill = engines("p")
    request = asking()
    request.num_computed_tokens, request.status = 10, status
    assert prefill.scheduler.finished(request, [[3, 1, 4]]) == (False, None)
    request.status = Status.FINISHED_STOPPED
    assert prefill.scheduler.finished(Request("q", prompt(), None, 10, Status.FINISHED_STOPPED), [[3]]) == (False, None)


def test_ranks_that_do_not_agree_how_many_they_are_are_refused(engines: Any) -> None:
    prefill, decode = engines("p"), engines("d", ranks=2)
    params = prefill.prefill(asking("odd\nname"), [3, 1, 4])
    first, second = (worker.node for worker in decode.workers)
    first.pull(params["kvlink"], {"group0": [5, 2, 6]}, ranks=2, deadline_s=10).wait(timeout_s=15)
    odd = second.pull(params["kvlink"], {"group0": [5, 2, 6]}, ranks=3, deadline_s=10)
    with pytest.raises(AlreadyClaimed, match="one of 2 ranks, and now by one of 3"):
        odd.wait(timeout_s=15)
    second.pull(params["kvlink"], {"group0": [5, 2, 6]}, ranks=2, deadline_s=10).wait(timeout_s=15)
    prefill.until("sent", "odd\nname")
    with pytest.raises(InvalidArgument, match=r"ranks is 0, outside \[1, "):
        first.pull(params["kvlink"], {"group0": [5, 2, 6]}, ranks=0)


def event(command_id: str, kind: Any, error: Any = None) -> Event:
    return Event(id=command_id, tag=None, kind=kind, error=error)


def test_the_ledger_tells_each_request_once_and_only_when_its_blocks_are_free() -> None:
    ledger = Ledger()
    ledger.expect("a", "r1", sends=True)
    ledger.expect("b", "r2", sends=False)
    ledger.expect("c", "r3", sends=False, quiet=True)
    assert ledger.take([event("a", "outcome"), event("b", "outcome", PeerLost("gone"))]) == Report()
    report = ledger.take([event(one, kind) for one in ("b", "a", "x") for kind in ("released",)])
    assert (report.sent, report.received, report.failed) == ({"r1"}, {"r2"}, {"r2"})
    report = ledger.take([event("c", "outcome"), event("c", "released"), event("a", "released")])
    assert (report.sent, report.received) == (set(), set())
    assert [ended.request_id for ended in report.ended] == ["r3"]
    assert len(ledger) == 0


def test_the_ledger_tells_that_a_request_came_before_that_it_went() -> None:
    ledger = Ledger()
    ledger.expect("in", "r", sends=False)
    ledger.expect("out", "r", sends=True)
    both = [event(one, kind) for one in ("out", "in") for kind in ("outcome", "released")]
    first, second = ledger.take(both), ledger.take([])
    assert (first.received, first.sent) == ({"r"}, set())
    assert (second.received, second.sent) == (set(), {"r"})


def test_counts_of_workers_add_up_and_say_it_in_a_line() -> None:
    one = {"pulls": [[0.25, 1 << 20, 4, "vectored", {"move": 0.1}]], "failed": {"PeerLost": 1}}
    other = {"failed": {"PeerLost": 1, "Cancelled": 2}, "offers_failed": {"TicketExpired": 1}, "offers_read": 3}
    total = stats.added(one, other)
    assert total["failed"] == {"PeerLost": 2, "Cancelled": 2}
    assert stats.summary(total) == {
        "Pulls": 1,
        "Avg pull time (ms)": 250.0,
        "P90 pull time (ms)": 250.0,
        "MB pulled": 1.0,
        "Throughput (MB/s)": 4.0,
        "Offers read": 3,
        "Failed pulls": 4,
        "Failed offers": 1,
    }
    assert stats.is_empty(stats.empty_counts())
    assert not stats.is_empty(total)
    assert isinstance(Cancelled(), kvlink.KvlinkError)
