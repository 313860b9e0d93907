"""Sizes as people write them: ``4096``, ``64KiB``, ``256MiB``."""

from __future__ import annotations

import re

from kvlink.errors import InvalidArgument

__all__ = ["format_size", "parse_counts", "parse_numbers", "parse_size"]

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_size(text: str) -> int:
    """Return the bytes that `text` names.

    Only powers of two have a unit here: ``64KB`` could mean either, so it is refused.

    Raises
    ------
    InvalidArgument
        If `text` is not a positive whole number followed by nothing, ``KiB``, ``MiB`` or ``GiB``.
    """
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or int(match[1]) == 0:
        raise InvalidArgument(f"size {text!r} is not like 4096, 64KiB, 256MiB or 1GiB")
    return int(match[1]) * unit


def parse_counts(text: str) -> tuple[int, int]:
    """Return the two numbers of ``4096x64``.

    Raises
    ------
    InvalidArgument
        If `text` is not two positive whole numbers around an ``x``.
    """
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text)
    if match is None:
        raise InvalidArgument(f"size {text!r} is not like 4096x64: blocks x regions")
    return int(match[1]), int(match[2])


def parse_numbers(text: str) -> list[int]:
    """Return the numbers of ``1,64``.

    Raises
    ------
    InvalidArgument
        If `text` is not positive whole numbers between commas.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise InvalidArgument(f"{text!r} is not like 1,64: positive whole numbers between commas")
    return [int(part) for part in parts]


def format_size(size_bytes: int) -> str:
    """Return `size_bytes` in the largest unit that gives a whole number."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift}{unit}"
    return str(size_bytes)
