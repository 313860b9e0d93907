"""What an engine must provide so that its prefill can be handed to another worker.

The hooks are grouped by who calls them: the prefill worker, or the decode worker. kvlink calls
none of them itself: whoever owns the worker's loop does, around ``Node.offer`` and ``Node.pull``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvlink.errors import ProtocolError

if TYPE_CHECKING:
    from kvlink.layout import KVCache

__all__ = [
    "DecodeEngine",
    "FirstToken",
    "Prefilled",
    "PrefillEngine",
    "blocks_for",
]


def blocks_for(num_tokens: int, *, block_tokens: int) -> int:
    """Return how many blocks of `block_tokens` tokens hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)


class FirstToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload that travels with the KV: what the decode side feeds to its first forward."""

    token: int

    def pack(self) -> bytes:
        """Return the bytes for ``Node.offer(payload=...)``."""
        return msgspec.json.encode(self)

    @classmethod
    def unpack(cls, payload: bytes) -> FirstToken:
        """Read what a peer packed.

        Raises
        ------
        ProtocolError
            If `payload` is not what ``pack`` makes: the peer runs another engine.
        """
        try:
            return msgspec.json.decode(payload, type=cls)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"unpack the payload of a handoff: it holds no first token ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A finished prefill: the blocks to offer, and what goes along.

    The caller owns `blocks` and gives them back with ``PrefillEngine.release`` once every offer
    of them is released.
    """

    blocks: tuple[int, ...]
    num_tokens: int
    first_token: int


class PrefillEngine(Protocol):
    """What the prefill worker's loop calls."""

    @property
    def cache(self) -> KVCache:
        """The blocks, described for ``Node``."""
        ...

    def prefill(self, token_ids: Sequence[int]) -> Prefilled:
        """Compute the KV of `token_ids` into new blocks, and the token that follows."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back that no live offer holds any more."""
        ...


class DecodeEngine(Protocol):
    """What the decode worker's loop calls."""

    @property
    def cache(self) -> KVCache:
        """The blocks, described for ``Node``."""
        ...

    def admit(self, *, num_tokens: int, max_new_tokens: int) -> tuple[int, ...]:
        """Set blocks aside for a pull of `num_tokens` tokens and for what decoding adds."""
        ...

    def decode(self, blocks: Sequence[int], *, num_tokens: int, first_token: int, max_new_tokens: int) -> Iterator[int]:
        """Yield tokens, `first_token` first, over blocks that a pull has filled."""
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back that no live pull holds any more."""
        ...
