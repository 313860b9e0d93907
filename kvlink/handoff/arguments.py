"""Checks of what users pass, before anything is started."""

from __future__ import annotations

import operator
from typing import Any

from kvlink.errors import InvalidArgument

__all__ = ["check_count", "check_integrity", "check_milliseconds", "check_payload", "check_seconds", "check_text"]

# A day: longer is a slip of the unit, and 32-bit milliseconds end at 49 days.
_LONGEST_S = 86400.0
_TEXT_LENGTH = 256
_INTEGRITIES = ("crc32c", "xxh3")


def check_count(value: Any, *, low: int, high: int, called: str) -> int:
    """Return `value` as an int in [`low`, `high`]; raise ``InvalidArgument`` otherwise."""
    try:
        count = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{called} must be a whole number, not {value!r}") from None
    if isinstance(value, bool) or not low <= count <= high:
        raise InvalidArgument(f"{called} is {value!r}, outside [{low}, {high}]")
    return count


def check_seconds(value: Any, *, called: str, may_be_zero: bool = False) -> float:
    """Return `value` as seconds, more than 0 and at most a day; raise ``InvalidArgument`` otherwise."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{called} must be a number of seconds, not {value!r}") from None
    if may_be_zero and seconds == 0:
        return seconds
    if not 0 < seconds <= _LONGEST_S:  # also false for nan
        raise InvalidArgument(f"{called} is {value!r}; it must be more than 0 and at most {_LONGEST_S:g} seconds")
    return seconds


def check_milliseconds(value: Any, *, called: str) -> int:
    """Return `value`, given in seconds, as whole milliseconds; raise ``InvalidArgument`` as ``check_seconds`` does."""
    return max(1, round(check_seconds(value, called=called) * 1000))


def check_text(value: Any, *, called: str, may_be_empty: bool) -> str:
    """Return `value` if it is printable text of moderate length; raise ``InvalidArgument`` otherwise."""
    if not isinstance(value, str) or len(value) > _TEXT_LENGTH or not value.isprintable():
        raise InvalidArgument(
            f"{called} must be printable text of at most {_TEXT_LENGTH} characters, not {value!r:.80}"
        )
    if not value and not may_be_empty:
        raise InvalidArgument(f"{called} must not be empty")
    return value


def check_integrity(value: Any, *, called: str) -> str:
    """Return the name of a checksum, empty for ``None``; raise ``InvalidArgument`` for anything else."""
    if value is None:
        return ""
    if value not in _INTEGRITIES:
        raise InvalidArgument(f"{called} is {value!r}; choose from {', '.join(_INTEGRITIES)}, or leave it out")
    return str(value)


def check_payload(value: Any, *, most_bytes: int, called: str) -> bytes:
    """Return `value` as bytes, at most `most_bytes` of them; raise ``InvalidArgument`` otherwise."""
    if isinstance(value, str | int):
        raise InvalidArgument(f"{called} must be bytes, not {type(value).__name__}")
    try:
        payload = bytes(memoryview(value))
    except (TypeError, BufferError) as error:
        raise InvalidArgument(f"{called} must be bytes: {error}") from None
    if len(payload) > most_bytes:
        raise InvalidArgument(
            f"{called} has {len(payload)} bytes, more than the {most_bytes} of limits.payload_bytes: put it into blocks"
        )
    return payload
