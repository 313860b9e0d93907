"""The messages that two nodes exchange before the native core takes their connection over.

A frame is a little-endian 32-bit length and one msgpack message. The length is checked against a
limit before a byte of the body is awaited, and the body is decoded into a bounded type: nothing
here trusts the sender. Who sends which message when is told in ``kvlink/handoff/handshake.py``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar

import msgspec

from kvlink.errors import ProtocolError

__all__ = [
    "MAGIC",
    "OPEN_FRAME_BYTES",
    "SEALED_FRAME_BYTES",
    "COMMON",
    "DIALECTS",
    "MOST_ASKED_BYTES",
    "Answer",
    "Ask",
    "Challenge",
    "Dialect",
    "Hello",
    "IntroduceAsker",
    "IntroduceSource",
    "IntroduceTarget",
    "Message",
    "Proof",
    "Refuse",
    "Welcome",
    "decode",
    "encode",
    "frame",
    "frame_bytes",
    "versions",
]

MAGIC = "kvlink"

# Until the peer has proved the secret it may not make this node hold more than this.
OPEN_FRAME_BYTES = 4 << 10
# Afterwards: a layout of 200 layers takes about 100 KiB, a packed key about 200 bytes.
SEALED_FRAME_BYTES = 1 << 20

# What one question or one answer carries. More belongs into blocks.
MOST_ASKED_BYTES = 512 << 10

_LENGTH = struct.Struct("<I")

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Mac = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Epoch = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_HostId = Annotated[bytes, msgspec.Meta(max_length=64)]
_UcxAddress = Annotated[bytes, msgspec.Meta(max_length=64 << 10)]
_Layout = Annotated[bytes, msgspec.Meta(min_length=1, max_length=768 << 10)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
_Address = Annotated[int, msgspec.Meta(ge=0)]
_Key = Annotated[bytes, msgspec.Meta(max_length=16 << 10)]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a newer peer may have given fields which this build skips."""


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The dialer's first words: what it speaks, and a number it never used before."""

    magic: Annotated[str, msgspec.Meta(max_length=16)]
    versions: Annotated[list[_Version], msgspec.Meta(min_length=1, max_length=16)]
    nonce: _Nonce


class Challenge(Message, frozen=True, kw_only=True, tag="challenge"):
    """The acceptor's answer: the dialect that both will speak, and its own fresh number."""

    version: _Version
    nonce: _Nonce


class Proof(Message, frozen=True, kw_only=True, tag="proof"):
    """Evidence of the secret over everything said so far; two while secrets are exchanged."""

    macs: Annotated[list[_Mac], msgspec.Meta(min_length=1, max_length=2)]


class IntroduceSource(Message, frozen=True, kw_only=True, tag="source"):
    """Who the acceptor is and how its cache is laid out. Nothing in here lets anyone read from it."""

    epoch: _Epoch
    name: _Name
    host_id: _HostId
    layout: _Layout


class IntroduceTarget(Message, frozen=True, kw_only=True, tag="target"):
    """Who the dialer is, and what it will take on this connection.

    ``layout`` is the dialer's own cache, restricted to what this source was elected to deliver; the
    acceptor compiles its template from it.
    """

    epoch: _Epoch
    wanted_epoch: _Epoch
    name: _Name
    host_id: _HostId
    ucx_address: _UcxAddress
    layout: _Layout


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """The acceptor's last word here: how its regions are reached. The native core speaks from now on.

    The three lists have one entry for each region of the layout. ``pool_socket`` is an abstract
    unix socket at which ``pool_token`` buys, once, descriptors of the regions that are
    ``mappable``; both are empty for a dialer on another host.
    """

    ucx_address: _UcxAddress
    region_addresses: Annotated[list[_Address], msgspec.Meta(max_length=16384)]
    keys: Annotated[list[_Key], msgspec.Meta(max_length=16384)]
    mappable: Annotated[list[bool], msgspec.Meta(max_length=16384)]
    pool_socket: Annotated[bytes, msgspec.Meta(max_length=100)]
    pool_token: Annotated[bytes, msgspec.Meta(max_length=32)]


class IntroduceAsker(Message, frozen=True, kw_only=True, tag="asker"):
    """Who the dialer is that only wants to ask; in place of ``IntroduceTarget``. Questions follow."""

    epoch: _Epoch
    name: _Name
    address: _Name


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """One question. The next one comes when it is answered.

    ``remaining_ms`` is how long the asker waits, from when it sent this.
    """

    number: Annotated[int, msgspec.Meta(ge=0)]
    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    remaining_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]
    body: Annotated[bytes, msgspec.Meta(max_length=MOST_ASKED_BYTES)]


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """The answer to the question of this number, or the name of an error class and a message for people.

    The last three are of a ``LayoutMismatch`` and empty otherwise.
    """

    number: Annotated[int, msgspec.Meta(ge=0)]
    body: Annotated[bytes, msgspec.Meta(max_length=MOST_ASKED_BYTES)] = b""
    code: _Text = ""
    message: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    field: _Text = ""
    source_value: _Text = ""
    target_value: _Text = ""


class Refuse(Message, frozen=True, kw_only=True, tag="refuse"):
    """Why the sender hangs up: the name of an error class, and a message for people.

    The last three are of a ``LayoutMismatch`` and empty otherwise.
    """

    code: _Name
    message: Annotated[str, msgspec.Meta(max_length=1024)]
    field: _Text = ""
    source_value: _Text = ""
    target_value: _Text = ""


_M = TypeVar("_M", bound=Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the msgpack form of `message`."""
    return _encoder.encode(message)


def decode(body: bytes, expected: type[_M]) -> _M | Refuse:
    """Return the message in `body`, which must be an `expected` or a ``Refuse``.

    Raises
    ------
    ProtocolError
        If it is anything else; the message names the field that is off.
    """
    try:
        message: _M | Refuse = msgspec.msgpack.decode(body, type=expected | Refuse)
    except (msgspec.DecodeError, RecursionError) as error:
        name = getattr(expected, "__name__", str(expected))
        raise ProtocolError(f"expected {name} and got something else: {error}") from None
    return message


class _Encode(Protocol):
    def __call__(self, message: Message, /) -> bytes:
        """Return the bytes of a message."""


class _Decode(Protocol):
    def __call__(self, body: bytes, expected: type[_M], /) -> _M | Refuse:
        """Return the expected message or a refusal; raise ``ProtocolError`` for anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How one version writes what follows Challenge. Hello and Challenge are the same in every version.

    Attributes
    ----------
    number
        The version; the native core writes it into each of its frames, and takes no other.
    asks
        Whether a dialer may introduce itself to ask.
    """

    number: int
    encode: _Encode = encode
    decode: _Decode = decode
    asks: bool = True


COMMON = Dialect(number=0)
"""How messages are written before a version is chosen, refusals included."""

DIALECTS: dict[int, Dialect] = {1: Dialect(number=1)}
"""The dialects that this build speaks, by version. ``tests/helpers/dialect_0.py`` has a frozen older one."""


def versions() -> list[int]:
    """Return the versions that this build speaks, the newest, which is preferred, first."""
    return sorted(DIALECTS, reverse=True)


def frame(body: bytes) -> bytes:
    """Return `body` behind its length."""
    return _LENGTH.pack(len(body)) + body


def frame_bytes(prefix: bytes, *, limit: int) -> int:
    """Return the length in the four bytes `prefix` of a frame.

    Raises
    ------
    ProtocolError
        If it is zero or more than `limit`.
    """
    length: int = _LENGTH.unpack(prefix)[0]
    if not 0 < length <= limit:
        raise ProtocolError(
            f"a frame of {length} bytes, where 1 to {limit} are allowed: is the other side a kvlink node?"
        )
    return length
