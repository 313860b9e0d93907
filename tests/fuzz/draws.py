"""Reading choices out of an input, so that every input means something: the counterpart of native/fuzz.hpp."""

from __future__ import annotations

import marshal
from typing import Any

_EDGES = (
    0,
    1,
    -1,
    255,
    256,
    1 << 15,
    (1 << 16) - 1,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
_ODD: tuple[Any, ...] = (
    None,
    True,
    "",
    "a",
    "\0",
    "\u00e9" * 300,
    b"",
    b"\xff" * 33,
    [],
    {},
    [[]],
    {"a": {}},
    1.5,
    -0.0,
)


def _copied(value: Any) -> Any:
    """Return a deep copy of plain data; the quickest way to one."""
    return marshal.loads(marshal.dumps(value))


class Draws:
    """Past the end of the input everything is zero."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        """Whether the input is used up."""
        return self._at >= len(self._data)

    def byte(self) -> int:
        """Return the next byte."""
        at = self._at
        self._at = at + 1
        return self._data[at] if at < len(self._data) else 0

    def below(self, end: int) -> int:
        """Return a number below `end`, which is at most 256."""
        return self.byte() % end

    def bytes(self, most: int) -> bytes:
        """Return what follows, `most` bytes of it."""
        at = self._at
        self._at = min(len(self._data), at + most)
        return self._data[at : self._at]

    def rest(self) -> bytes:
        """Return all that follows."""
        return self.bytes(len(self._data))

    def number(self, usual: int) -> int:
        """Return a number: small nearly always."""
        kind = self.byte()
        if kind < 224:
            return kind % (usual + 1)
        return _EDGES[kind % len(_EDGES)]

    def odd(self) -> Any:
        """Return a value that nobody expects where it is put."""
        kind = self.byte()
        if kind < 96:
            return _copied(_ODD[kind % len(_ODD)])
        if kind < 192:
            return _EDGES[kind % len(_EDGES)]
        if kind < 224:
            return self.bytes(self.byte()).decode("latin-1")
        return self.bytes(self.byte())

    def spoiled(self, value: Any, *, most: int = 3) -> Any:
        """Return a copy of plain data with some of it replaced, taken out, doubled or added; often just a copy."""
        spoiled = _copied(value)
        for _ in range(self.below(most + 1)):
            self._spoil(spoiled)
        return spoiled

    def _spoil(self, inside: Any) -> None:
        while True:
            keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            if not keys:
                return
            key = keys[self.below(len(keys))]
            child = inside[key]
            if isinstance(child, dict | list) and self.byte() & 3:
                inside = child
                continue
            self._change(inside, key)
            return

    def _change(self, inside: Any, key: Any) -> None:
        what = self.below(8)
        if what < 4:
            inside[key] = self.odd()
        elif what == 4:
            del inside[key]
        elif what == 5 and isinstance(inside, list):
            inside.append(_copied(inside[key]))
        elif what == 6 and isinstance(inside, dict):
            inside[str(self.odd())[:64]] = self.odd()
        elif isinstance(inside[key], int):
            inside[key] = min(max(inside[key] + self.below(5) - 2, -1 << 63), _EDGES[-1])  # what msgpack can tell
        elif isinstance(inside[key], str | bytes):
            at = self.byte() % (len(inside[key]) + 1)
            inside[key] = inside[key][:at] + inside[key][at + 1 :]
