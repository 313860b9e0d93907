"""Real messages of kvlink: what fuzz targets spoil, and what the kept corpora are made of."""

from __future__ import annotations

from typing import Any

import msgspec

from kvlink import wire
from kvlink.handoff.introduction import Introduction
from kvlink.handoff.reservation import make_reservation
from kvlink.handoff.ticket import TicketSource, make_ticket
from kvlink.layout.geometry import CacheLayout, GroupLayout, PartLayout

SECRET = b"swordfish"
EPOCH = bytes(range(16))


def sources(count: int = 2) -> list[TicketSource]:
    """Return some nodes."""
    return [
        TicketSource(name=f"prefill-{i}", address=f"10.0.0.{i + 1}:7000", epoch=bytes([i] * 16).hex())
        for i in range(count)
    ]


def ticket() -> dict[str, Any]:
    """Return the ticket of an offer of two ranks."""
    return make_ticket(
        epoch=EPOCH, sequence=7, sources=sources(), num_tokens=12, groups=["full", "sliding"], readers=2, ttl_ms=30_000
    )


def reservation() -> dict[str, Any]:
    """Return the ticket of a reservation."""
    target = TicketSource(name="decode-1", address="[::1]:7001", epoch=EPOCH.hex())
    return make_reservation(
        epoch=EPOCH, sequence=3, target=target, num_tokens=12, skip_tokens=4, groups=["full"], ttl_ms=1000
    )


def descriptor() -> dict[str, Any]:
    """Return what a node tells its scheduler."""
    groups = [{"name": "full", "num_blocks": 8, "block_tokens": 4, "slots": False}]
    return {"kvlink": 1, "name": "decode-1", "address": "decode-1:7001", "epoch": EPOCH.hex(), "groups": groups}


def worker_entry() -> dict[str, Any]:
    """Return what a decode worker lists in a directory."""
    counts: dict[str, Any] = {"blocks": {"full": 8}, "free_blocks": {"full": 8}, "block_tokens": {"full": 4}}
    return {
        "name": "decode-1",
        "address": "10.0.0.9:7001",
        "epoch": EPOCH.hex(),
        "load": 1,
        "window_bytes": 0,
        **counts,
    }


def _part(layer: str, component: str, offset: int, **fields: Any) -> PartLayout:
    usual: dict[str, Any] = {"group": "full", "head_start": 0, "head_count": 2, "total_kv_heads": 2, "head_dim": 4}
    strides = {"block_stride": 64, "token_stride": 16, "head_stride": 8, "dim_stride": 2}
    elements = {"element_bytes": 2, "dtype": "float16", "region": 0, "offset": offset}
    return PartLayout(layer=layer, component=component, **{**usual, **elements, **strides, **fields})  # type: ignore[arg-type]


def layout() -> CacheLayout:
    """Return a small cache: two groups, keys and values, and slots of state."""
    groups = (
        GroupLayout(name="full", num_blocks=4, block_tokens=4),
        GroupLayout(name="state", num_blocks=3, block_tokens=1, slots=True),
    )
    state = {"group": "state", "head_count": 1, "total_kv_heads": 1, "token_stride": 0, "head_stride": 0}
    parts = (
        _part("0", "k", 0),
        _part("0", "v", 256),
        _part("1", "k", 0, region=1),
        _part("1", "v", 256, region=1),
        _part("2", "state", 512, block_stride=8, **state),
    )
    return CacheLayout(groups=groups, parts=parts, region_bytes=(536, 512), model="tiny")


def plain_layout() -> dict[str, Any]:
    """Return it as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(layout())
    plain["parts"] = list(plain["parts"])
    plain["groups"] = list(plain["groups"])
    plain["region_bytes"] = list(plain["region_bytes"])
    return plain


def introduction() -> Introduction:
    """Return a node as its peers see it."""
    packed = msgspec.msgpack.encode(layout())
    return Introduction(
        epoch=EPOCH,
        name="prefill-1",
        packed_layout=packed,
        region_addresses=(4096, 8192),
        mappable=(True, False),
        keys=(b"key", b"key"),
        ucx_address=b"address",
        host_id=b"host",
    )


def as_plain(message: wire.Message) -> dict[str, Any]:
    """Return a message as plain data, with its tag."""
    plain: dict[str, Any] = msgspec.msgpack.decode(wire.encode(message))
    return plain
