"""The first inputs of each target, made of real messages: with them a fuzzer begins where honest peers go."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable

from fuzz import samples

_ATTEMPT = bytes([1, 2, 3]) + bytes(13) + struct.pack("<QI", 77, 5)


def _frame(kind: int, body: bytes, *, dialect: int = 1) -> bytes:
    """Return a control frame as docs/WIRE.md has it."""
    return struct.pack("<IBBH", len(body), kind, dialect, 0) + _ATTEMPT + bytes(4) + body


def _tables(*tables: list[int]) -> bytes:
    counts = struct.pack(f"<{len(tables) + 1}I", len(tables), *map(len, tables))
    return counts + b"".join(struct.pack(f"<{len(table)}i", *table) for table in tables)


def _frames() -> list[bytes]:
    """Return one frame of each kind, by its number."""
    piece = struct.pack("<iHH", 3, 0, 1)
    layers = struct.pack("<III", 1, 0, 2)
    bodies: dict[int, bytes] = {
        1: struct.pack("<BQQIB", 1, 0, 2, 5000, 0),
        2: struct.pack("<IQBIII", 60_000, 2, 1, 3, 1, 2) + b"abc" + struct.pack("<2i", 3, 5),
        3: struct.pack("<BH", 4, 5) + b"ended",
        4: struct.pack("<III", 1, 1, 0)[:8] + piece + struct.pack("<I", 0) + layers,
        5: struct.pack("<Q", 2),
        6: struct.pack("<Q", 128),
        7: b"",
        8: b"",
        9: struct.pack("<I", 1) + _ATTEMPT + struct.pack("<I", 3000),
        10: struct.pack("<II", 1, 1) + piece + struct.pack("<I", 0),
        11: struct.pack("<Q", 0) + bytes(8),
        12: bytes([9]) + bytes(15) + struct.pack("<QQ", 4, 2),
        13: struct.pack("<QQ", 0, 2) + layers + _tables([3, 5]),
        14: b"payload",
        15: struct.pack("<BH", 5, 5) + b"taken",
    }
    return [_frame(kind, body) for kind, body in bodies.items()]


def _streams() -> list[bytes]:
    """Return a dialect, a cut, and frames one behind the other."""
    frames = _frames()
    pairs = [first + second for first, second in itertools.pairwise(frames)]
    return [bytes([1, cut]) + stream for cut in (0, 15, 255) for stream in (*frames, *pairs, b"".join(frames[:6]))]


def _said_by_sources() -> list[bytes]:
    """Return the life of a pull: a grant, its transfer, VALID; and one with sums; and one that is pushed."""
    grant, arrived, valid = bytes([0, 0, 0, 0, 0]), bytes([168]), bytes([4, 0, 0])
    return [bytes([shape, integrity]) + grant + arrived + valid for shape in (0, 1, 2) for integrity in (0, 200)]


def _said_by_readers() -> list[bytes]:
    """Return the life of an offer: claimed and confirmed, by one reader or two."""
    claim = bytes([0, 0, 0, 1, 0, 0, 2, 100, 0])
    confirm = bytes([5, 0, 0, 1, 128])
    return [bytes([0, readers, 0]) + claim * readers + confirm * readers for readers in (1, 2, 3)]


def _plain(count: int) -> list[bytes]:
    """Return some inputs of small numbers, for targets that read choices."""
    return [bytes((step * at + step) % 64 for at in range(count)) for step in range(1, 8)]


def _json(*messages: object) -> list[bytes]:
    return [bytes([kind, 255]) + json.dumps(message).encode() for kind, message in enumerate(messages)]


_OF: dict[str, Callable[[], list[bytes]]] = {
    "control_frames": _frames,
    "channel": _streams,
    "source_side": _said_by_readers,
    "target_side": _said_by_sources,
    "tickets": lambda: [
        *_json(samples.ticket(), samples.reservation(), samples.descriptor()),
        *(bytes([kind, 0, 0]) for kind in range(3)),
    ],
    "handshake_insider": lambda: [bytes([side, 0, part]) for side in range(2) for part in range(2)],
}


def of(target: str) -> list[bytes]:
    """Return the seeds of one target."""
    return _OF[target]() if target in _OF else _plain(48)
