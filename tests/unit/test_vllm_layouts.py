"""vLLM's KV cache layouts: each is described from shapes and strides alone, and each pair of them is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.late_imports import import_late
from helpers.vllm_shapes import (
    LAYOUTS,
    CacheConfig,
    FullAttentionSpec,
    Group,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    views,
)

import kvlink
from kvlink.engines.vllm.layouts import Content, DescribedCache, RankPlace, content_of, describe, read_groups
from kvlink.engines.vllm.tables import PagedGroup, node_tables, whole_blocks
from kvlink.errors import LayoutMismatch, NotOffered, UnsupportedMemory

torch = import_late("torch")

NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
BLOCKS = 6
PLAIN = Content(tag="int16", whole_blocks=False)

MakeNode = Callable[[str, DescribedCache], kvlink.Node]


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    nodes: list[kvlink.Node] = []

    def make(name: str, described: DescribedCache) -> kvlink.Node:
        nodes.append(kvlink.Node(described.cache, name=name, copy_threads=1))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def config(tokens: int = 8, spec: type[KVCacheSpec] = FullAttentionSpec, **more: Any) -> CacheConfig:
    return CacheConfig([Group(NAMES, spec(tokens, **more))], BLOCKS)


def described(
    tensors: list[Any], of: CacheConfig, *, content: Content = PLAIN, place: RankPlace | None = None
) -> DescribedCache:
    return describe(
        dict(zip(NAMES, tensors, strict=True)),
        read_groups(of),
        num_blocks=of.num_blocks,
        place=place or RankPlace(),
        content=lambda layer, tokens: content,
    )


def filled(tensors: list[Any], *, first_head: int = 0, heads: int | None = None) -> list[Any]:
    """Give every element a number of its own, by (layer, block, head of the model, token, content)."""
    for number, tensor in enumerate(tensors):
        blocks, own, tokens, content = tensor.shape
        total = own if heads is None else heads
        grid = torch.arange(blocks * total * tokens * content).reshape(blocks, total, tokens, content)
        tensor.copy_((grid[:, first_head : first_head + own] + 1 + 8000 * number).to(tensor.dtype))
    return tensors


def tokens_of(tensor: Any, table: list[int], num_tokens: int) -> Any:
    """Return [token, head, content] of a request."""
    rows = torch.cat([tensor[block].transpose(0, 1) for block in table])
    return rows[:num_tokens]


def hand_over(source: kvlink.Node, target: kvlink.Node, blocks: Any, into: Any, *, num_tokens: int, skip: int = 0):
    offer = source.offer(blocks, num_tokens=num_tokens, ttl_s=20)
    target.pull(offer.ticket, into, skip_tokens=skip, deadline_s=10).wait(timeout_s=15)


def test_each_layout_is_served_to_each_other(make_node: MakeNode) -> None:
    """All layers of a layout are one region, and nothing but the request's tokens is written."""
    shape = {"layers": 2, "blocks": BLOCKS, "heads": 2, "tokens": 8, "content": 4}
    sources, targets = {}, {}
    for layout in LAYOUTS:
        tensors = filled(views(torch, layout, **shape))
        assert len(described(tensors, config()).cache.regions) == 1
        sources[layout] = (make_node(f"from-{layout}", described(tensors, config())), tensors)
        tensors = views(torch, layout, **shape)
        targets[layout] = (make_node(f"to-{layout}", described(tensors, config())), tensors)
    for source, from_tensors in sources.values():
        for target, to_tensors in targets.values():
            for tensor in to_tensors:
                tensor.zero_()
            hand_over(source, target, {"group0": [3, 1, 4]}, {"group0": [5, 0, 2]}, num_tokens=20)
            for one, other in zip(from_tensors, to_tensors, strict=True):
                assert torch.equal(tokens_of(other, [5, 0, 2], 20), tokens_of(one, [3, 1, 4], 20))
                assert not other[[1, 3, 4]].any()
                assert not other[2, :, 4:].any()


@pytest.mark.parametrize(("from_tokens", "to_tokens"), [(4, 8), (8, 4), (8, 6)])
def test_unequal_block_sizes_are_served_where_tokens_can_be_told_apart(
    make_node: MakeNode, from_tokens: int, to_tokens: int
) -> None:
    from_tensors = filled(views(torch, "LBNHC", layers=2, blocks=BLOCKS, heads=2, tokens=from_tokens, content=4))
    to_tensors = views(torch, "BLHNC", layers=2, blocks=BLOCKS, heads=2, tokens=to_tokens, content=4)
    source = make_node("from", described(from_tensors, config(from_tokens)))
    target = make_node("to", described(to_tensors, config(to_tokens)))
    hand_over(source, target, {"group0": [3, 1, 4, 0]}, {"group0": [5, 0, 2, 1]}, num_tokens=15)
    for one, other in zip(from_tensors, to_tensors, strict=True):
        assert torch.equal(tokens_of(other, [5, 0, 2, 1], 15), tokens_of(one, [3, 1, 4, 0], 15))


@pytest.mark.parametrize(("from_size", "to_size"), [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1)])
def test_heads_are_split_and_merged_over_tensor_parallel_ranks(
    make_node: MakeNode, from_size: int, to_size: int
) -> None:
    """Four ranks have two KV heads between them, each of which two ranks keep."""
    total = 2

    def rank(size: int, number: int, layout: str) -> tuple[list[Any], DescribedCache, int]:
        own = max(1, total // size)
        tensors = views(torch, layout, layers=2, blocks=BLOCKS, heads=own, tokens=8, content=4)
        place = RankPlace(tp_rank=number, tp_size=size, total_kv_heads=total)
        return tensors, described(tensors, config(), place=place), number * min(size, total) // size * own

    sources = []
    for number in range(from_size):
        tensors, cache, first = rank(from_size, number, "LBHNC")
        filled(tensors, first_head=first, heads=total)
        sources.append(make_node(f"from-{number}", cache))
    reference = filled(views(torch, "LBHNC", layers=2, blocks=BLOCKS, heads=total, tokens=8, content=4))
    ticket = kvlink.TicketMint([source.descriptor for source in sources]).offer(num_tokens=20)
    offers = [source.offer({"group0": [3, 1, 4]}, ticket=ticket) for source in sources]
    pulls = []
    for number in range(to_size):
        tensors, cache, first = rank(to_size, number, "LBNHC")
        target = make_node(f"to-{number}", cache)
        pulls.append((target.pull(ticket, {"group0": [5, 0, 2]}, ranks=to_size, deadline_s=10), tensors, first))
    for pull, tensors, first in pulls:
        pull.wait(timeout_s=15)
        for one, other in zip(reference, tensors, strict=True):
            expected = tokens_of(one, [3, 1, 4], 20)[:, first : first + other.shape[1]]
            assert torch.equal(tokens_of(other, [5, 0, 2], 20), expected)
    for offer in offers:
        offer.wait(timeout_s=15)  # free at once, though the ticket was made before anybody knew how many would read


def test_latents_are_the_same_on_every_rank(make_node: MakeNode) -> None:
    spec = config(4, MLAAttentionSpec, max_tp_shards=1)
    tensors = filled(views(torch, "BLNHC", layers=2, blocks=BLOCKS, heads=1, tokens=4, content=6))
    source = make_node("from", described(tensors, spec, place=RankPlace(tp_rank=0, tp_size=1)))
    into = views(torch, "LBHNC", layers=2, blocks=BLOCKS, heads=1, tokens=4, content=6)
    target = make_node("to", described(into, spec, place=RankPlace(tp_rank=3, tp_size=4)))
    hand_over(source, target, {"group0": [3, 1]}, {"group0": [5, 0]}, num_tokens=7)
    for one, other in zip(tensors, into, strict=True):
        assert torch.equal(tokens_of(other, [5, 0], 7), tokens_of(one, [3, 1], 7))


def hybrid(window: int) -> CacheConfig:
    full, near = Group(NAMES[:1], FullAttentionSpec(4)), Group(NAMES[1:], SlidingWindowSpec(4, sliding_window=window))
    return CacheConfig([full, near], BLOCKS)


def test_groups_that_lie_over_each_other_move_by_their_own_tables(make_node: MakeNode) -> None:
    """As vLLM's hybrid manager has them: the same bytes, and a block is of one group at a time."""
    sides = []
    for _ in range(2):
        (tensor,) = views(torch, "LBHNC", layers=1, blocks=BLOCKS, heads=2, tokens=4, content=4)
        sides.append([tensor, tensor])
    filled(sides[0][:1])
    source, target = (make_node(f"side-{i}", described(side, hybrid(6))) for i, side in enumerate(sides))
    tables = node_tables(
        [[3, 1, 4], [0, 2, 5]], [PagedGroup(name=f"group{i}", index=i, block_tokens=4) for i in (0, 1)], num_tokens=11
    )
    assert tables == {"group0": [3, 1, 4], "group1": [-1, 2, 5]}
    hand_over(source, target, tables, {"group0": [5, 4, 3], "group1": [-1, 1, 2]}, num_tokens=11)
    one, other = sides[0][0], sides[1][0]
    assert torch.equal(tokens_of(other, [5, 4, 3], 11), tokens_of(one, [3, 1, 4], 11))
    # The last six tokens, of which the first is the second one of its block.
    assert torch.equal(tokens_of(other, [1, 2], 7)[1:], tokens_of(one, [2, 5], 7)[1:])
    assert not other[1, :, 0].any()
    assert not other[0].any()


def test_a_kernel_may_have_smaller_blocks_than_the_scheduler(make_node: MakeNode) -> None:
    from_tensors = filled(views(torch, "LBHNC", layers=2, blocks=BLOCKS, heads=2, tokens=8, content=4, split=2))
    to_tensors = views(torch, "LBNHC", layers=2, blocks=BLOCKS, heads=2, tokens=8, content=4)
    halves, whole = described(from_tensors, config()), described(to_tensors, config())
    assert halves.cache.block_tokens() == 4
    blocks = node_tables([[3, 1]], halves.groups, num_tokens=13)
    assert blocks == {"group0": [6, 7, 2, 3]}
    hand_over(make_node("from", halves), make_node("to", whole), blocks, {"group0": [5, 0]}, num_tokens=13)
    for one, other in zip(from_tensors, to_tensors, strict=True):
        assert torch.equal(tokens_of(other, [5, 0], 13), tokens_of(one, [6, 7, 2, 3], 13))


def packed(tokens: int, isa: str = "vec", dtype: str = "bfloat16") -> Content:
    return content_of(dtype=dtype, backend="CPU_ATTN", block_tokens=tokens, isa=isa)


def test_packed_blocks_move_whole(make_node: MakeNode) -> None:
    """A CPU keeps the second half of a token's content far behind the first; half a block would be neither."""
    spec = CacheConfig([Group(NAMES, SlidingWindowSpec(8, sliding_window=9))], BLOCKS)
    tensors = filled(views(torch, "LBHNC", layers=2, blocks=BLOCKS, heads=2, tokens=8, content=4))
    into = views(torch, "LBHNC", layers=2, blocks=BLOCKS, heads=2, tokens=8, content=4)
    source = described(tensors, spec, content=packed(8))
    target = described(into, spec, content=packed(8))
    assert source.whole_blocks
    end = whole_blocks(33, [8])
    assert end == 40
    nodes = make_node("from", source), make_node("to", target)
    # Tokens 24 to 32 are seen by token 33; block 2 has none of them, but would be asked for if it were there.
    for first in (-1, 5):
        for tensor in into:
            tensor.zero_()
        hand_over(*nodes, {"group0": [-1, -1, 5, 1, 4]}, {"group0": [-1, -1, first, 0, 2]}, num_tokens=end)
        for one, other in zip(tensors, into, strict=True):
            assert torch.equal(other[[0, 2]], one[[1, 4]])
            assert torch.equal(other[5], one[5]) == (first == 5)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (packed(8), packed(16)),
        (packed(8), packed(8, isa="amx")),
        (packed(8), packed(8, dtype="float16")),
        (PLAIN, packed(8)),
        (
            content_of(dtype="int16", backend="CPU_MLA", block_tokens=8),
            content_of(dtype="int16", backend="X", block_tokens=8),
        ),
    ],
)
def test_what_a_packing_makes_impossible_is_refused_when_nodes_connect(
    make_node: MakeNode, source: Content, target: Content
) -> None:
    shape = {"layers": 2, "blocks": BLOCKS, "heads": 2, "tokens": 8, "content": 4}
    one = make_node("from", described(filled(views(torch, "LBHNC", **shape)), config(), content=source))
    other = make_node("to", described(views(torch, "LBHNC", **shape), config(), content=target))
    with pytest.raises(LayoutMismatch) as caught:
        hand_over(one, other, {"group0": [3]}, {"group0": [5]}, num_tokens=8)
    assert caught.value.field == "dtype"
    assert source.tag in str(caught.value)
    assert target.tag in str(caught.value)


def test_a_block_that_prefill_has_let_go_of_is_not_pulled_for_another(make_node: MakeNode) -> None:
    shape = {"layers": 2, "blocks": BLOCKS, "heads": 2, "tokens": 8, "content": 4}
    one, other = (make_node(name, described(views(torch, "LBHNC", **shape), config())) for name in ("from", "to"))
    with pytest.raises(NotOffered):
        hand_over(one, other, {"group0": [-1, 2]}, {"group0": [5, 1]}, num_tokens=16)


def test_contents_are_told_apart_by_what_they_are() -> None:
    assert content_of(dtype="bfloat16", backend="FLASH_ATTN", block_tokens=16) == Content(
        tag="bfloat16", whole_blocks=False
    )
    eight = content_of(dtype="uint8", backend="FLASHINFER", block_tokens=16, cache_dtype="fp8_e4m3")
    assert eight == Content(tag="fp8_e4m3", whole_blocks=False)
    for odd in ("turboquant_4bit_nc", "nvfp4", "int8_per_token_head"):
        content = content_of(dtype="uint8", backend="FLASHINFER", block_tokens=16, cache_dtype=odd)
        assert content.whole_blocks
        assert odd in content.tag
    assert packed(32).tag == "bfloat16 packed by cpu_attn-vec in blocks of 32"


def test_a_pipeline_stage_has_only_the_groups_of_its_layers() -> None:
    spec = hybrid(6)
    (tensor,) = views(torch, "LBHNC", layers=1, blocks=BLOCKS, heads=2, tokens=4, content=4)
    found = describe(
        {NAMES[1]: tensor}, read_groups(spec), num_blocks=BLOCKS, place=RankPlace(), content=lambda *_: PLAIN
    )
    assert found.cache.groups == ("group1",)
    assert [group.index for group in found.groups] == [1]


def test_a_group_that_vllm_does_not_transfer_is_left_out() -> None:
    spec = hybrid(6)
    spec.kv_cache_groups[0].enable_kv_transfer = False
    assert [group.name for group in read_groups(spec)] == ["group1"]


def test_what_cannot_be_described_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedMemory, match="state of a linear attention"):
        read_groups(config(8, MambaSpec))
    with pytest.raises(UnsupportedMemory, match="KVCacheSpec, which KvlinkConnector does not know"):
        read_groups(config(8, KVCacheSpec))
    with pytest.raises(UnsupportedMemory, match="one state for 4 tokens"):
        read_groups(config(8, FullAttentionSpec, tokens_per_state=4))
    tensors = views(torch, "LBHNC", layers=2, blocks=BLOCKS, heads=2, tokens=8, content=4)
    with pytest.raises(UnsupportedMemory, match="not 6 blocks of 16 tokens"):
        described(tensors, config(16))
    with pytest.raises(UnsupportedMemory, match=r"not \[block, head, token, content\]"):
        described([tensor[0] for tensor in tensors], config())
