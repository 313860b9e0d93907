"""A dialect older than any that was released, frozen: it proves that an older one is really spoken.

Its messages are msgpack lists, a number for the kind first, and it knows nothing of hosts: two
nodes that speak it take each other for strangers of different hosts, so their bytes go by the
lane ``staged``. Never change what is written here; only the conversion to today's messages may follow
those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvlink import wire
from kvlink.errors import ProtocolError

VERSION = 0

# Kind, and the fields in their order.
_FORMS: dict[type[Any], tuple[int, tuple[str, ...]]] = {
    wire.Proof: (1, ("macs",)),
    wire.IntroduceSource: (2, ("epoch", "name", "layout")),
    wire.IntroduceTarget: (3, ("epoch", "wanted_epoch", "name", "ucx_address", "layout")),
    wire.Welcome: (4, ("ucx_address", "region_addresses", "keys", "mappable", "pool_socket", "pool_token")),
    wire.Refuse: (5, ("code", "message", "field", "source_value", "target_value")),
}
# What today's messages have and this dialect cannot say.
_ABSENT: dict[type[Any], dict[str, Any]] = {
    wire.IntroduceSource: {"host_id": b""},
    wire.IntroduceTarget: {"host_id": b""},
}

spoken = [0, 0]
"""How many messages this process has written and read in it."""


def encode(message: Any, /) -> bytes:
    """Write one message as the dialect does."""
    kind, fields = _FORMS[type(message)]
    spoken[0] += 1
    return msgspec.msgpack.encode([kind, *(getattr(message, field) for field in fields)])


def decode(body: bytes, expected: Any, /) -> Any:
    """Read one message, which must be an `expected` or a refusal."""
    try:
        kind, *values = msgspec.msgpack.decode(body)
        for wanted in (expected, wire.Refuse):
            number, fields = _FORMS[wanted]
            if number == kind:
                spoken[1] += 1
                return msgspec.convert({**_ABSENT.get(wanted, {}), **dict(zip(fields, values, strict=True))}, wanted)
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError, ValueError) as error:
        raise ProtocolError(f"dialect 0: expected {expected.__name__}: {error}") from None
    raise ProtocolError(f"dialect 0: expected {expected.__name__} and got kind {kind}")


def speak(versions: list[int]) -> Callable[[], None]:
    """Make this process speak only `versions`, 0 among them; return how to undo it."""
    before = dict(wire.DIALECTS)
    known = {**before, VERSION: wire.Dialect(encode=encode, decode=decode, asks=False)}
    wire.DIALECTS.clear()
    wire.DIALECTS.update({version: known[version] for version in versions})

    def undo() -> None:
        wire.DIALECTS.clear()
        wire.DIALECTS.update(before)

    return undo
