"""Two processes with unlike dtypes: what arrives is converted, on each lane, and whatever ends a pull ends that too."""

from __future__ import annotations

from dataclasses import dataclass, replace

import hypothesis
import pytest
from helpers.conversions import BITS, PAIRS
from helpers.patterns import APART_AXES, Geometry, Placement, Request
from helpers.processes import Pair
from helpers.soak import SEED, rounds
from hypothesis import strategies as st
from integration.test_integrity_on_each_lane import GEOMETRY, MOST_TRIES, REQUEST, cells_that_differ, named
from integration.test_push_on_each_lane import COMMIT, PIECEWISE, ready
from property.test_handoff_moves_exactly import placements, requests

from kvlink import errors

LARGE_BLOCKS = 32
LARGE = Request(
    source_blocks=tuple(range(LARGE_BLOCKS)),
    target_blocks=tuple(range(LARGE_BLOCKS))[::-1],
    num_tokens=4 * LARGE_BLOCKS,
)
#: Layouts a lane, with two handoffs each.
CASES_PER_LANE = rounds(5, 200)


def of_dtype(geometry: Geometry, dtype: str) -> Geometry:
    """NumPy has no bfloat16: every dtype is given as bits and a name."""
    return replace(geometry, dtype=BITS[dtype].name, tag=dtype)


@dataclass(frozen=True)
class Case:
    """Two layouts of one cache in two dtypes, and a pull and a push between them."""

    seed: int
    geometry: Geometry
    pair: tuple[str, str]
    integrity: str | None
    source: Placement
    target: Placement
    requests: tuple[Request, ...]


@st.composite
def cases(draw: st.DrawFn, memories: tuple[str, ...]) -> Case:
    geometry = Geometry(
        layers=tuple(f"layers.{index}" for index in range(draw(st.integers(1, 3)))),
        heads=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from((1, 5, 8, 16, 40))),
    )
    source = draw(placements(geometry, draw(st.sampled_from(memories)), draw(st.sampled_from((4, 1, 3, 16)))))
    target = draw(placements(geometry, draw(st.sampled_from(("pool", "numpy"))), draw(st.sampled_from((4, 2, 6, 16)))))
    return Case(
        seed=draw(st.integers(0, 2**31 - 1)),
        geometry=geometry,
        pair=draw(st.sampled_from(PAIRS)),
        integrity=draw(st.sampled_from((None, None, "crc32c", "xxh3"))),
        source=source,
        target=target,
        requests=tuple(draw(requests(source, target)) for _ in range(2)),
    )


def test_what_arrives_in_another_dtype_is_what_the_reference_makes_of_it(pair: Pair) -> None:
    memories = ("pool",) if pair.lane.lane == "mapped" else ("pool", "numpy")

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=CASES_PER_LANE,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases(memories))
    def run(case: Case) -> None:
        pair.open(
            of_dtype(case.geometry, case.pair[0]),
            target_geometry=of_dtype(case.geometry, case.pair[1]),
            source=case.source,
            target=case.target,
            seed=case.seed,
            integrity=case.integrity,
            convert=("->".join(case.pair),),
            limits=PIECEWISE,
        )
        pulled, pushed = case.requests
        assert pair.hand_over(pulled).lane == pair.lane.lane
        half = pushed.num_tokens // 2
        said = [ready(tokens=range(half)), ready(tokens=range(half, pushed.num_tokens))] if half else []
        taken = pair.push_over(pushed, *said, COMMIT)
        assert taken.lane in (pair.lane.lane, "")
        assert not any(pair.holds())

    run()


@pytest.mark.parametrize("integrity", ["crc32c", "xxh3"])
def test_bits_that_turn_over_before_they_are_converted_are_named_exactly(pair: Pair, integrity: str) -> None:
    pair.open(
        of_dtype(GEOMETRY, "bfloat16"),  # every bit of which shows in a float32
        target_geometry=GEOMETRY,
        source=Placement(
            memory=pair.lane.memory, num_blocks=12, block_tokens=6, axes=("block", "kv", "head", "token", "dim")
        ),
        target=Placement(num_blocks=12, block_tokens=4, axes=APART_AXES, padding=(0, 1)),
        integrity=integrity,
        convert=("bfloat16->float32",),
    )
    pair.target.call("inject_faults", seed=5, corrupt=1.0 if pair.lane.lane == "staged" else 0.4)
    offered, ticket = pair.offer(REQUEST)
    pulled = pair.pull(ticket, REQUEST)
    with pytest.raises(errors.DataCorrupted, match=rf"(?s)other {integrity} sums.*tokens \["):
        pair.target.call("wait", pulled)
    told = pair.target.call("wait_released", pulled)
    pair.expect(REQUEST)
    wrong = cells_that_differ(pair)
    assert wrong
    assert named(told.failed) == wrong
    pair.target.call("inject_faults")
    again = pair.pull(ticket, REQUEST)
    assert pair.target.call("wait", again).phases_s["convert"] > 0
    pair.target.call("wait_released", again)
    pair.source.call("wait_released", offered)
    pair.verify()
    (peer,) = pair.target.call("peers")
    assert peer["converts"] == ["bfloat16->float32"]
    (reader,) = pair.source.call("peers")
    assert reader["converts"] == []


def begin_large(pair: Pair) -> tuple[int, int]:
    """Blocks of 2 MiB of float32, which take a while to be converted by one thread."""
    geometry = Geometry(layers=("layers.0",), heads=8, head_dim=8192)
    placement = Placement(num_blocks=LARGE_BLOCKS)
    pair.source.start("open", geometry, placement, seed=2, name="source")
    options = {"name": "target", "copy_threads": 1, "convert": ("float32->float16",)}
    pair.target.call("open", of_dtype(geometry, "float16"), placement, seed=3, **options)
    pair.source.result()
    offered, ticket = pair.offer(LARGE)
    return offered, pair.pull(ticket, LARGE)


@pytest.mark.parametrize("end", ["cancel_when_moved", "close_when_moved"])
def test_a_pull_can_be_ended_while_it_is_converted(opened: Pair, end: str) -> None:
    """Its last piece may be converted between the look and the end, and then it has arrived: it tries again."""
    ended = "Cancelled" if end == "cancel_when_moved" else "Closed"
    tries: list[tuple[str, str | None]] = []
    while ("converting", ended) not in tries and len(tries) < MOST_TRIES:
        offered, pulled = begin_large(opened)
        seen = opened.target.call(end, pulled)
        told = opened.target.call("wait_released", pulled)
        opened.source.call("cancel", offered)
        opened.source.call("wait_released", offered)
        assert told.error in (None, ended)
        tries.append((seen, told.error))
    assert ("converting", ended) in tries
    assert {each.group for each in told.failed} == {"full"}
    opened.shut()
