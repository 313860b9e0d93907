"""What two nodes of ``kvlink.fallback`` say to each other, and how each proves that it knows the secret.

Hello (source), claim (target), grant or refusal (source), the bytes, confirm (target), grant or refusal.
Every message but the hello ends with a code of the secret over both sides' random numbers, so none can be
made up, altered, or repeated; the grant has the digest of the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Annotated

import msgspec
import numpy as np

from kvlink.errors import AuthenticationFailed, KvlinkError, ProtocolError, VersionMismatch, error_class
from kvlink.layout import CacheLayout, validate_layout
from kvlink.plan.packed import Tokens
from kvlink.transport.python_two_sided import Bytes, Endpoint, receive_frame, send_frame

__all__ = ["Claim", "Conversation", "Grant", "Refusal", "digest_of", "refusal_of"]

_VERSION = 1
_NONCE_BYTES = 16
_MAC_BYTES = 32
_MOST_BYTES = 64 << 20

_encode = msgspec.msgpack.Encoder().encode


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """What a target wants: of each group of its layout, how many tokens there may be, and a bit for each."""

    handoff: Annotated[str, msgspec.Meta(max_length=64)]
    epoch: bytes
    layout: CacheLayout
    tokens: list[tuple[int, bytes]]

    @classmethod
    def of(cls, layout: CacheLayout, tokens: Tokens, *, handoff: str, epoch: bytes) -> Claim:
        """Return the claim of these tokens."""
        masks = []
        for group in layout.groups:
            wanted = tokens[group.name]
            mask = np.zeros(int(wanted[-1]) + 1 if len(wanted) else 0, dtype=np.uint8)
            mask[wanted] = 1
            masks.append((len(mask), np.packbits(mask).tobytes()))
        return cls(handoff=handoff, epoch=epoch, layout=layout, tokens=masks)

    def wanted(self, *, most: int) -> Tokens:
        """Return the tokens; raises ``ProtocolError`` if they are more than `most`, or cut off."""
        found = {}
        if len(self.tokens) != len(self.layout.groups):
            raise ProtocolError(f"a claim of {len(self.tokens)} groups where its layout has {len(self.layout.groups)}")
        for group, (count, bits) in zip(self.layout.groups, self.tokens, strict=True):
            if not 0 <= count <= most or len(bits) != -(-count // 8):
                raise ProtocolError(f"a claim of {count} tokens of group {group.name} where {most} are the most")
            found[group.name] = np.flatnonzero(np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count))
        return found


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag="grant"):
    """So many bytes follow. The answer to a confirm, too: then none do."""

    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    digest: bytes
    payload: bytes


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """An error of ``kvlink.errors``, by its name."""

    kind: Annotated[str, msgspec.Meta(max_length=64)]
    message: Annotated[str, msgspec.Meta(max_length=4096)]

    def error(self) -> KvlinkError:
        """Return it."""
        return error_class(self.kind)(self.message)


_answers = msgspec.msgpack.Decoder(Grant | Refusal)
_claims = msgspec.msgpack.Decoder(Claim)


def refusal_of(error: KvlinkError) -> Refusal:
    """Return how `error` is told."""
    return Refusal(kind=type(error).__name__, message=str(error)[:4096])


def digest_of(packed: Bytes) -> bytes:
    """Return what the bytes are compared by."""
    return hashlib.blake2b(packed.data, digest_size=32).digest()


class Conversation:
    """One connection's messages, in their order."""

    def __init__(self, endpoint: Endpoint, *, secret: bytes) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._nonces = b""
        self._said = 0

    async def say_hello(self) -> None:
        """Begin as the source."""
        self._nonces = os.urandom(_NONCE_BYTES)
        await send_frame(self._endpoint, bytes([_VERSION]) + self._nonces)

    async def hear_hello(self) -> None:
        """Begin as the target."""
        hello = await receive_frame(self._endpoint, most=1 + _NONCE_BYTES)
        if len(hello) != 1 + _NONCE_BYTES or hello[0] != _VERSION:
            raise VersionMismatch(f"the peer speaks version {hello[:1].hex()} of the fallback, this is {_VERSION}")
        self._nonces = hello[1:]

    async def ask(self, claim: Claim) -> Grant:
        """Claim, and return what was granted; raises what it was refused with."""
        own = os.urandom(_NONCE_BYTES)
        await self._send(own + _encode(claim))
        self._nonces += own
        return await self._hear_answer()

    async def hear_claim(self) -> Claim:
        """Return the claim of whoever knows the secret."""
        body = await self._receive()
        try:
            claim = _claims.decode(body[_NONCE_BYTES:])
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"not a claim: {error}") from None
        validate_layout(claim.layout)
        self._nonces += body[:_NONCE_BYTES]
        return claim

    async def answer(self, answer: Grant | Refusal) -> None:
        """Grant or refuse."""
        await self._send(_encode(answer))

    async def confirm(self) -> None:
        """Say that everything is here, and hear that it still counts; raises why it does not."""
        await self._send(b"")
        await self._hear_answer()

    async def hear_confirm(self) -> None:
        """Wait for that."""
        await self._receive()

    async def _hear_answer(self) -> Grant:
        try:
            answer: Grant | Refusal = _answers.decode(await self._receive())
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"not an answer: {error}") from None
        if isinstance(answer, Refusal):
            raise answer.error()
        return answer

    async def _send(self, body: bytes) -> None:
        await send_frame(self._endpoint, body + self._code(body))

    async def _receive(self) -> bytes:
        sealed = await receive_frame(self._endpoint, most=_MOST_BYTES)
        body, code = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
        if len(sealed) < _MAC_BYTES or not hmac.compare_digest(code, self._code(body)):
            raise AuthenticationFailed("the peer does not know the secret of this node: pass the same secret= to both")
        return body

    def _code(self, body: bytes) -> bytes:
        self._said += 1
        return hmac.digest(self._secret, self._said.to_bytes(4, "little") + self._nonces + body, "sha256")
