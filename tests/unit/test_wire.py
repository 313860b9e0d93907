"""Messages are bounded before they are parsed, and typed when they are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink import wire
from kvlink.errors import ProtocolError

HELLO = wire.Hello(magic=wire.MAGIC, versions=[1], nonce=bytes(32))


def test_a_message_survives_the_wire() -> None:
    assert wire.decode(wire.encode(HELLO), wire.Hello) == HELLO


def test_a_refusal_may_come_in_place_of_any_message() -> None:
    refusal = wire.Refuse(code="Busy", message="later")
    for expected in (wire.Hello, wire.Challenge, wire.Proof, wire.IntroduceSource, wire.IntroduceTarget, wire.Welcome):
        assert wire.decode(wire.encode(refusal), expected) == refusal


def test_another_message_than_expected_is_refused() -> None:
    with pytest.raises(ProtocolError, match="expected Proof"):
        wire.decode(wire.encode(HELLO), wire.Proof)


def test_fields_of_a_newer_peer_are_skipped() -> None:
    body = msgspec.msgpack.encode({**msgspec.msgpack.decode(wire.encode(HELLO)), "news": [1, 2]})
    assert wire.decode(body, wire.Hello) == HELLO


@pytest.mark.parametrize(
    ("field", "value"),
    [("nonce", bytes(31)), ("nonce", "x" * 32), ("versions", []), ("versions", [-1]), ("versions", [1] * 17)],
)
def test_a_field_out_of_bounds_is_named(field: str, value: object) -> None:
    body = msgspec.msgpack.encode({**msgspec.msgpack.decode(wire.encode(HELLO)), field: value})
    with pytest.raises(ProtocolError, match=field):
        wire.decode(body, wire.Hello)


@given(st.binary(max_size=200))
def test_garbage_is_a_typed_error(body: bytes) -> None:
    for expected in (wire.Hello, wire.Challenge, wire.Proof, wire.IntroduceSource, wire.IntroduceTarget):
        with pytest.raises(ProtocolError):
            wire.decode(body, expected)


def test_deep_nesting_is_a_typed_error() -> None:
    with pytest.raises(ProtocolError):
        wire.decode(b"\x91" * 4000, wire.Hello)


@pytest.mark.parametrize("length", [0, 4097, 0xFFFFFFFF, int.from_bytes(b"GET ", "little")])
def test_a_frame_of_unlikely_length_is_refused_before_its_body(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"a frame of {length} bytes"):
        wire.frame_bytes(length.to_bytes(4, "little"), limit=wire.OPEN_FRAME_BYTES)


def test_a_frame_carries_its_length() -> None:
    framed = wire.frame(b"body")
    assert wire.frame_bytes(framed[:4], limit=4) == 4
    assert framed[4:] == b"body"


def test_a_refusal_with_the_longest_text_fits_into_an_open_frame() -> None:
    refusal = wire.Refuse(code="LayoutMismatch", message="m" * 1024, field="f" * 256, source_value="s" * 256)
    assert len(wire.encode(refusal)) < wire.OPEN_FRAME_BYTES
