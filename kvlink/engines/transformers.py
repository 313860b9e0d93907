"""A paged KV cache for Hugging Face causal models, over blocks that kvlink can hand over.

``PagedPool`` owns the blocks, ``PagedSequence`` is a ``transformers`` cache whose keys and values
live in some of them, and ``TransformersEngine`` runs the two halves of a generation: a prefill
that ends with its blocks and the first token, and a decode that starts from those.

Attention gets the same values in the same order as from transformers' own cache, so the two give
the same tokens. Layers with a sliding window keep all their tokens; the model's mask hides the old ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import kvlink
from kvlink.engines.base import Prefilled, blocks_for
from kvlink.errors import InvalidArgument
from kvlink.handoff import BlockPool

try:
    import torch
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError(
        f"kvlink.engines.transformers needs torch and transformers: pip install 'kvlink[demo]' ({error})"
    ) from error

if TYPE_CHECKING:
    from kvlink.layout import KVCache

__all__ = ["PagedPool", "PagedSequence", "TransformersEngine"]


class PagedPool:
    """The blocks of one worker: one allocation of ``kvlink.empty`` for all layers.

    The tensor has the shape ``(layers, 2, num_blocks, block_tokens, kv_heads, head_dim)``, so that
    one block of one layer's keys (or values) is one contiguous run.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        shuffle_seed: int | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        shape = (num_layers, 2, num_blocks, block_tokens, num_kv_heads, head_dim)
        self.tensor: torch.Tensor = torch.from_dlpack(kvlink.empty(shape, str(dtype).removeprefix("torch.")))
        self.tensor.zero_()  # So that the first transfer does not wait for pages that nobody has touched.
        self.allocator = BlockPool(num_blocks, shuffle_seed=shuffle_seed)
        self._cache: KVCache | None = None

    @classmethod
    def for_model(
        cls, model: Any, *, num_blocks: int, block_tokens: int = 16, shuffle_seed: int | None = None
    ) -> PagedPool:
        """Make a pool with the geometry of `model`, a ``transformers`` causal model on the CPU.

        Raises
        ------
        InvalidArgument
            If the model keeps something other than one KV shape for all layers (linear attention,
            a latent cache, heads that differ by layer).
        """
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if unknown := kinds - {"full_attention", "sliding_attention"}:
            raise InvalidArgument(
                f"make a paged pool for {config.model_type}: layers of kind {sorted(unknown)} keep no KV blocks"
            )
        if getattr(config, "kv_lora_rank", None) is not None:
            raise InvalidArgument(f"make a paged pool for {config.model_type}: it caches latents, not keys and values")
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            dtype=model.dtype,
            shuffle_seed=shuffle_seed,
        )

    @property
    def bytes_per_token(self) -> int:
        """How many bytes the keys and values of one token take in all layers together."""
        return int(self.tensor.nbytes) // (self.num_blocks * self.block_tokens)

    @property
    def cache(self) -> KVCache:
        """The blocks, described for ``kvlink.Node``."""
        if self._cache is None:
            self._cache = kvlink.KVCache.from_tensors(
                {f"layers.{index}": layer for index, layer in enumerate(self.tensor)},
                axes="kv block token head dim",
                block_tokens=self.block_tokens,
            )
        return self._cache

    def slots_of(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return the place of each token of `blocks` in a layer seen as ``(slots, heads, dim)``."""
        first = torch.tensor(blocks, dtype=torch.int64) * self.block_tokens
        return (first[:, None] + torch.arange(self.block_tokens)).flatten()


class _PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of one sequence: writes new tokens to their slots, gathers all for attention."""

    def __init__(self, sequence: PagedSequence, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.sequence = sequence
        self.index = index
        self.slotted_keys = keys.flatten(0, 1)
        self.slotted_values = values.flatten(0, 1)
        self.num_tokens = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool exists before the sequence does."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``(1, heads, new tokens, dim)`` and return all tokens, ``(1, heads, tokens, dim)``."""
        if key_states.shape[0] != 1:
            raise InvalidArgument(
                f"update a paged sequence: it holds one sequence, not a batch of {key_states.shape[0]}"
            )
        begin, end = self.num_tokens, self.num_tokens + key_states.shape[-2]
        slots = self.sequence.slots_until(end)
        self.slotted_keys[slots[begin:end]] = key_states[0].transpose(0, 1)
        self.slotted_values[slots[begin:end]] = value_states[0].transpose(0, 1)
        self.num_tokens = end
        if self.sequence.on_layer is not None:
            self.sequence.on_layer(self.index, range(begin, end))
        return self._gather(self.slotted_keys, slots), self._gather(self.slotted_values, slots)

    @staticmethod
    def _gather(slotted: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return slotted.index_select(0, slots).transpose(0, 1).unsqueeze(0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys after the next update, and the position of the first."""
        return self.num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens are stored."""
        return self.num_tokens

    def get_max_length(self) -> int:
        """Return -1: the sequence takes blocks as it grows."""
        return -1

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse: a paged sequence is one beam."""
        raise InvalidArgument("reorder a paged sequence: beam search is not supported")


class PagedSequence(Cache):  # type: ignore[misc]
    """The keys and values of one sequence, in blocks of a pool, as a ``transformers`` cache.

    Pass it as ``model(..., cache=sequence)``. With `blocks` and `num_tokens` it starts from
    blocks that hold tokens already, for example because a pull has filled them. It takes more
    blocks from the pool's allocator when it outgrows those it has. ``blocks`` lists what it holds; freeing
    them is the caller's. `on_layer` is told each time that a layer has stored tokens.
    """

    def __init__(
        self,
        pool: PagedPool,
        *,
        blocks: Sequence[int] = (),
        num_tokens: int = 0,
        on_layer: Callable[[int, range], None] | None = None,
    ) -> None:
        if num_tokens > len(blocks) * pool.block_tokens:
            raise InvalidArgument(f"make a paged sequence: {len(blocks)} blocks cannot hold {num_tokens} tokens")
        self.pool = pool
        self.on_layer = on_layer
        self.blocks = list(blocks)
        self._slots = pool.slots_of(self.blocks)
        layers = [_PagedLayer(self, index, keys, values) for index, (keys, values) in enumerate(pool.tensor)]
        for layer in layers:
            layer.num_tokens = num_tokens
        super().__init__(layers=layers)

    @property
    def num_tokens(self) -> int:
        """How many tokens the last layer holds, which is updated last."""
        return int(self.layers[-1].num_tokens)

    def slots_until(self, end_token: int) -> torch.Tensor:
        """Return the slots of tokens ``[0, end_token)``, taking more blocks if they are needed."""
        missing = blocks_for(end_token, block_tokens=self.pool.block_tokens) - len(self.blocks)
        if missing > 0:
            self.blocks += self.pool.allocator.allocate(missing)
            self._slots = self.pool.slots_of(self.blocks)
        return self._slots[:end_token]


class TransformersEngine:
    """Runs prefill and greedy decode of one causal model over a pool of kvlink blocks.

    It is a ``PrefillEngine`` and a ``DecodeEngine`` both. ``forward_tokens`` records how many
    tokens each forward took, in order: the proof that a decode worker never recomputes a prompt.
    """

    def __init__(self, model: Any, *, num_blocks: int, block_tokens: int = 16, shuffle_seed: int | None = None) -> None:
        self.model = model
        self.pool = PagedPool.for_model(
            model, num_blocks=num_blocks, block_tokens=block_tokens, shuffle_seed=shuffle_seed
        )
        self.forward_tokens: list[int] = []
        eos = model.generation_config.eos_token_id
        self.stop_tokens = frozenset([eos] if isinstance(eos, int) else eos or [])
        # transformers 5 renamed the argument; the old name still works there, with a warning.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def cache(self) -> KVCache:
        """The blocks, described for ``kvlink.Node``."""
        return self.pool.cache

    def prefill(self, token_ids: Sequence[int]) -> Prefilled:
        """Compute the KV of `token_ids` into new blocks, and the token that follows.

        Raises
        ------
        OutOfMemory
            If the pool has too few free blocks.
        """
        count = blocks_for(len(token_ids), block_tokens=self.pool.block_tokens)
        blocks = self.pool.allocator.allocate(count)
        try:
            *_, first_token = self.prefill_chunks(token_ids, blocks=blocks, chunk_tokens=len(token_ids))
        except BaseException:
            self.pool.allocator.free(blocks)
            raise
        return Prefilled(blocks=blocks, num_tokens=len(token_ids), first_token=first_token)

    def prefill_chunks(
        self,
        token_ids: Sequence[int],
        *,
        blocks: Sequence[int],
        chunk_tokens: int,
        on_layer: Callable[[int, range], None] | None = None,
    ) -> Iterator[int]:
        """Compute the KV of `token_ids` into `blocks`, some tokens at a time, so that decodes can go on in between.

        Yields after each chunk the token that follows it; the last one is the first token of the answer. `on_layer`
        is told of each layer, ``layers.<index>`` of the cache, as soon as the keys and values of tokens are there.
        """
        sequence = PagedSequence(self.pool, blocks=blocks, on_layer=on_layer)
        for begin in range(0, len(token_ids), chunk_tokens):
            yield self._forward(sequence, token_ids[begin : begin + chunk_tokens])

    def admit(self, *, num_tokens: int, max_new_tokens: int) -> tuple[int, ...]:
        """Set blocks aside for a pull of `num_tokens` tokens and for what decoding adds.

        Raises
        ------
        OutOfMemory
            If the pool has too few free blocks.
        """
        # The last new token is never fed back, so it needs no slot.
        total = num_tokens + max(0, max_new_tokens - 1)
        return self.pool.allocator.allocate(blocks_for(total, block_tokens=self.pool.block_tokens))

    def decode(self, blocks: Sequence[int], *, num_tokens: int, first_token: int, max_new_tokens: int) -> Iterator[int]:
        """Yield up to `max_new_tokens` tokens, `first_token` first; each further one takes a forward.

        Ends after a token that the model's generation config calls an end of sequence.
        """
        sequence = PagedSequence(self.pool, blocks=blocks, num_tokens=num_tokens)
        token = first_token
        for remaining in range(max_new_tokens, 0, -1):
            yield token
            if token in self.stop_tokens or remaining == 1:
                return
            token = self._forward(sequence, [token])

    def release(self, blocks: Sequence[int]) -> None:
        """Take `blocks` back into the pool; no live offer or pull may hold them."""
        self.pool.allocator.free(blocks)

    def _forward(self, sequence: PagedSequence, token_ids: Sequence[int]) -> int:
        self.forward_tokens.append(len(token_ids))
        with torch.inference_mode():
            output = self.model(
                torch.tensor([token_ids], dtype=torch.int64),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: sequence},
            )
        return int(output.logits[0, -1].argmax())
