"""Who asks for integrity, and who pays: by node, by offer, on one side or on both, over one source or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvlink
from kvlink import errors
from kvlink.testing import FaultScript, inject_faults, remove_faults

BLOCKS = 8
HEADS = 4

Make = Callable[..., kvlink.Node]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes nodes over caches of 8 blocks of 4 tokens, full of one number; they are closed at the end."""
    nodes: list[kvlink.Node] = []

    def node(name: str, fill: int, *, heads: range = range(HEADS), window: int | None = None, **options: object):
        tensor = np.full((2, BLOCKS, 4, len(heads), 8), fill, dtype="float32")
        cache = kvlink.KVCache.from_tensors(
            {"a": tensor},
            axes="kv block token head dim",
            block_tokens=4,
            heads=heads,
            total_kv_heads=HEADS,
            window=window,
        )
        nodes.append(kvlink.Node(cache, name=name, copy_threads=1, **options))  # type: ignore[arg-type]
        return nodes[-1]

    yield node
    for each in nodes:
        each.close()


@pytest.mark.parametrize(
    ("of_source", "of_offer", "of_target", "checked"),
    [
        (None, None, None, ""),
        ("crc32c", None, None, "crc32c"),
        (None, "xxh3", None, "xxh3"),
        ("crc32c", "xxh3", None, "xxh3"),
        (None, None, "crc32c", "crc32c"),
        ("xxh3", None, "crc32c", "crc32c"),
        ("crc32c", "crc32c", "crc32c", "crc32c"),
    ],
)
def test_the_reader_s_demand_comes_before_the_offer_s_and_that_before_the_node_s(
    make: Make, of_source: str | None, of_offer: str | None, of_target: str | None, checked: str
) -> None:
    source = make("source", 1, integrity=of_source)
    target = make("target", 2, integrity=of_target)
    pull = target.pull(source.offer([1, 2], num_tokens=7, integrity=of_offer).ticket, [3, 4])
    pull.wait(timeout_s=5)
    assert (pull.phases_s["check"] > 0) == bool(checked)
    inject_faults(target, FaultScript(corrupt=1.0))
    again = target.pull(source.offer([1, 2], num_tokens=7, integrity=of_offer).ticket, [3, 4])
    if checked:
        with pytest.raises(errors.DataCorrupted, match=f"other {checked} sums"):
            again.wait(timeout_s=5)
    else:
        again.wait(timeout_s=5)  # nobody asked, so nobody looked


def test_only_the_names_of_checksums_are_taken(make: Make) -> None:
    for wrong in ("md5", "", 1, "CRC32C"):
        with pytest.raises(errors.InvalidArgument, match="node: integrity is .* choose from crc32c, xxh3"):
            make("source", 1, integrity=wrong)
        with pytest.raises(errors.InvalidArgument, match="offer: integrity is"):
            make("source", 1).offer([1], num_tokens=4, integrity=wrong)


def test_what_several_sources_bring_is_told_apart(make: Make) -> None:
    """Every source is checked before anything is told, so the part that is right is not called wrong."""
    sources = [make(f"rank-{r}", r, heads=range(2 * r, 2 * r + 2)) for r in range(2)]
    target = make("target", 9, integrity="crc32c")
    ticket = kvlink.TicketMint([source.descriptor for source in sources]).offer(num_tokens=7, ttl_s=5)
    offers = [source.offer([1, 2], ticket=ticket) for source in sources]
    for seed in range(8):
        counted = inject_faults(target, FaultScript(seed=seed, corrupt=0.3))
        pull = target.pull(ticket, [3, 4])
        assert pull.wait_released(timeout_s=5)
        if pull.outcome == "succeeded":
            assert counted.read()["corrupted"] == 0
            ticket = kvlink.TicketMint([source.descriptor for source in sources]).offer(num_tokens=7, ttl_s=5)
            offers = [source.offer([1, 2], ticket=ticket) for source in sources]
            continue
        with pytest.raises(errors.DataCorrupted) as caught:
            pull.poll()
        # One bit a piece, hence one head of one component in one block.
        tokens = {(0, 4), (4, 7)}
        assert len(caught.value.failed) == counted.read()["corrupted"]
        assert all(each.end_head == each.first_head + 1 for each in caught.value.failed)
        assert {(each.first_token, each.end_token) for each in caught.value.failed} <= tokens
        assert caught.value.valid_prefix_tokens == min(each.first_token for each in caught.value.failed)
    remove_faults(target)
    target.pull(ticket, [3, 4]).wait(timeout_s=5)
    for offer in offers:
        offer.wait(timeout_s=5)


def test_a_window_at_the_end_of_a_longer_request_has_no_valid_prefix(make: Make) -> None:
    source, target = make("source", 1, window=8), make("target", 2, window=8, integrity="xxh3")
    inject_faults(target, FaultScript(corrupt=1.0))
    pull = target.pull(source.offer(list(range(8)), num_tokens=32).ticket, list(range(8)))
    with pytest.raises(errors.DataCorrupted) as caught:
        pull.wait(timeout_s=5)
    assert min(each.first_token for each in caught.value.failed) >= 24
    assert caught.value.valid_prefix_tokens == 0


@pytest.mark.parametrize(("lane", "integrity"), [("staged", None), ("mapped", "crc32c")])
def test_blocks_that_the_wire_cannot_name_are_refused_before_a_byte_moves(lane: str, integrity: str | None) -> None:
    """FETCH and CHECK count the tokens of a block in 16 bits."""

    def node(name: str) -> kvlink.Node:
        tensors = {"a": np.asarray(kvlink.empty((2, 1, 70_000, 1, 1), "uint8"))}
        cache = kvlink.KVCache.from_tensors(tensors, axes="kv block token head dim", block_tokens=70_000)
        return kvlink.Node(cache, name=name, copy_threads=1, integrity=integrity)

    with node("source") as source, node("target") as target:
        pull = target.pull(source.offer([0], num_tokens=70_000).ticket, [0], require=lane)
        with pytest.raises(errors.LayoutMismatch, match=r"70000 tokens at the source.* at most 65535"):
            pull.wait(timeout_s=5)
        assert pull.wait_released(timeout_s=5)
