"""What a scheduler asks a decode worker, and what that answers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from kvlink.errors import ProtocolError
from kvlink.handoff.ticket import MOST_SOURCES, TicketSource

__all__ = ["RESERVE", "STAND", "WITHDRAW", "Reserve", "Reserved", "Withdraw", "pack", "sendable", "unpack"]

RESERVE = "reserve"
WITHDRAW = "withdraw"
STAND = "stand"
"""The kinds of the questions. The last has no body, and is answered as if there had been no room."""

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Label = Annotated[str, msgspec.Meta(max_length=256)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]
_Hash = int | Annotated[bytes, msgspec.Meta(max_length=256)]
# Of a prefix, so much is sent: what a worker has is nearly always within it, and the frame has a limit.
_MOST_HASH_BYTES = 256 << 10
_LONGEST_HASH = 256

_M = TypeVar("_M", bound=msgspec.Struct)


class Reserve(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the worker may take, by setting blocks aside to be pushed into.

    Attributes
    ----------
    request
        The scheduler's own id of this try. Asked again with the same one, the worker gives the same
        answer and does nothing twice.
    num_tokens
        Tokens that will be pushed.
    room_tokens
        Tokens that need room there: those, and the ones that will be generated.
    ttl_ms
        By when they must have been pushed.
    label
        The user's name for it.
    prefix_hashes
        One for each block of the prompt, each of everything up to there.
    sources
        Nodes that push beside the one that asks: the other ranks of its engine.
    """

    request: _Id
    num_tokens: _Tokens
    room_tokens: _Tokens
    ttl_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)]
    label: _Label = ""
    prefix_hashes: list[_Hash] = []
    sources: Annotated[list[TicketSource], msgspec.Meta(max_length=MOST_SOURCES - 1)] = []


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """How the worker stands, and whether it has taken the request.

    Attributes
    ----------
    ticket
        To push with; none if it has not.
    free_blocks
        What it has left, by group.
    load
        Requests that it has now.
    """

    ticket: dict[str, Any] | None
    free_blocks: dict[str, _Count]
    load: _Count


class Withdraw(msgspec.Struct, frozen=True, kw_only=True):
    """A request that will not be pushed, whether it was taken or not. The answer is empty."""

    request: _Id


def sendable(prefix_hashes: Sequence[Hashable]) -> list[int | bytes]:
    """Return as many of the first hashes as can be sent: numbers and bytes, and not too many."""
    found: list[int | bytes] = []
    left = _MOST_HASH_BYTES
    for one in prefix_hashes:
        if isinstance(one, bool) or not isinstance(one, int | bytes):
            break
        if isinstance(one, int):
            fits, size = -(1 << 63) <= one < 1 << 64, 9
        else:
            fits, size = len(one) <= _LONGEST_HASH, len(one) + 3
        left -= size
        if not fits or left < 0:
            break
        found.append(one)
    return found


def pack(message: msgspec.Struct) -> bytes:
    """Return the body of a question or an answer."""
    return msgspec.msgpack.encode(message)


def unpack(body: bytes, expected: type[_M]) -> _M:
    """Return the message in `body`, which is not trusted.

    Raises
    ------
    ProtocolError
        If it is anything else.
    """
    try:
        return msgspec.msgpack.decode(body, type=expected)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"expected {expected.__name__} and got something else: {error}") from None
