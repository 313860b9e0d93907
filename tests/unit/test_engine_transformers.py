"""The paged cache for Hugging Face models: the same numbers as transformers' own cache, in blocks that can be moved."""

import numpy as np
import pytest
from helpers.late_imports import import_late
from helpers.tiny_llama import make_model

import kvlink.memory
from kvlink.engines.base import FirstToken, blocks_for
from kvlink.errors import InvalidArgument, OutOfMemory, ProtocolError

torch = import_late("torch")
transformers = import_late("transformers")
engines = import_late("kvlink.engines.transformers", of="transformers")

BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def model():
    """A random Llama with grouped heads; one thread, so that sums are the same at every run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_model()
    torch.set_num_threads(before)


def prompt_of(length):
    return np.random.default_rng(length).integers(0, 256, length).tolist()


def reference(model, prompt, *, max_new_tokens):
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=257
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("length", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 100])
def test_prefill_in_one_pool_and_decode_in_another_gives_the_tokens_of_stock_generate(model, length):
    prompt = prompt_of(length)
    prefill = engines.TransformersEngine(model, num_blocks=10, block_tokens=BLOCK_TOKENS)
    decode = engines.TransformersEngine(model, num_blocks=12, block_tokens=BLOCK_TOKENS, shuffle_seed=3)

    prefilled = prefill.prefill(prompt)
    blocks = decode.admit(num_tokens=prefilled.num_tokens, max_new_tokens=20)
    for source, target in zip(prefilled.blocks, blocks, strict=False):
        decode.pool.tensor[:, :, target] = prefill.pool.tensor[:, :, source]
    tokens = list(
        decode.decode(blocks, num_tokens=prefilled.num_tokens, first_token=prefilled.first_token, max_new_tokens=20)
    )

    assert tokens == reference(model, prompt, max_new_tokens=20)
    assert prefill.forward_tokens == [length]
    assert decode.forward_tokens == [1] * (len(tokens) - 1)


def test_logits_are_those_of_the_stock_cache_bit_by_bit(model):
    stock, paged = (
        transformers.DynamicCache(config=model.config),
        engines.PagedSequence(engines.PagedPool.for_model(model, num_blocks=4)),
    )
    for piece in (prompt_of(37), [5], [200]):
        ids = torch.tensor([piece])
        with torch.inference_mode():
            expected = model(ids, cache=stock).logits
            assert torch.equal(model(ids, cache=paged).logits, expected)
    assert paged.num_tokens == 39
    assert len(paged.blocks) == blocks_for(39, block_tokens=BLOCK_TOKENS)


def test_a_sliding_window_is_left_to_the_mask():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    model = MistralForCausalLM(config).eval()
    prompt = prompt_of(30)
    engine = engines.TransformersEngine(model, num_blocks=4)
    prefilled = engine.prefill(prompt)
    tokens = list(engine.decode(prefilled.blocks, num_tokens=30, first_token=prefilled.first_token, max_new_tokens=12))
    assert tokens == reference(model, prompt, max_new_tokens=12)


def test_decoding_ends_at_the_end_of_the_sequence(model):
    engine = engines.TransformersEngine(model, num_blocks=4)
    prefilled = engine.prefill(prompt_of(5))
    tokens = list(engine.decode(prefilled.blocks, num_tokens=5, first_token=257, max_new_tokens=9))
    assert tokens == [257]
    assert engine.forward_tokens == [5]


def test_only_the_blocks_of_the_sequence_are_written(model):
    pool = engines.PagedPool.for_model(model, num_blocks=6)
    pool.tensor.fill_(7.0)
    with torch.inference_mode():
        model(torch.tensor([prompt_of(20)]), cache=engines.PagedSequence(pool, blocks=[4, 1]))
    untouched = pool.tensor[:, :, [0, 2, 3, 5]]
    assert torch.equal(untouched, torch.full_like(untouched, 7.0))
    assert torch.equal(pool.tensor[:, :, 1, 4:], torch.full_like(pool.tensor[:, :, 1, 4:], 7.0))
    assert not torch.any(pool.tensor[:, :, 1, :4] == 7.0)


def test_the_pool_is_one_allocation_with_a_layer_each(model):
    pool = engines.PagedPool.for_model(model, num_blocks=6)
    layers = {part.layer for part in pool.cache.layout.parts}
    assert layers == {"layers.0", "layers.1", "layers.2"}
    assert len(pool.cache.within_allocations(kvlink.memory.pool_of).regions) == 1
    assert pool.bytes_per_token == 3 * 2 * 2 * 8 * 4


def test_a_prefill_that_does_not_fit_takes_no_block(model):
    engine = engines.TransformersEngine(model, num_blocks=2)
    with pytest.raises(OutOfMemory, match="allocate 3 blocks: 2 of 2 are free"):
        engine.prefill(prompt_of(33))
    assert engine.pool.allocator.num_free == 2


def test_a_batch_is_refused(model):
    pool = engines.PagedPool.for_model(model, num_blocks=2)
    with pytest.raises(InvalidArgument, match="not a batch of 2"), torch.inference_mode():
        model(torch.tensor([[1], [2]]), cache=engines.PagedSequence(pool))


def test_layers_without_keys_and_values_are_refused():
    model = make_model(layer_types=["full_attention", "linear_attention", "full_attention"])
    with pytest.raises(InvalidArgument, match="linear_attention"):
        engines.PagedPool.for_model(model, num_blocks=2)


def test_more_tokens_than_the_blocks_hold_are_refused(model):
    with pytest.raises(InvalidArgument, match="1 blocks cannot hold 17 tokens"):
        engines.PagedSequence(engines.PagedPool.for_model(model, num_blocks=2), blocks=[0], num_tokens=17)


def test_the_first_token_travels_in_the_payload():
    assert FirstToken.unpack(FirstToken(49151).pack()) == FirstToken(49151)
    for garbage in (b"", b"{}", b'{"token": "x"}', b'{"token": 1, "prompt": "secret"}', b"\xff"):
        with pytest.raises(ProtocolError):
            FirstToken.unpack(garbage)
