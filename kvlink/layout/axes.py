"""The ``axes`` argument: one name per tensor dimension."""

from __future__ import annotations

from kvlink.errors import InvalidArgument

__all__ = ["parse_axes"]

KNOWN_AXES = ("layer", "kv", "block", "token", "head", "dim")
REQUIRED_AXES = ("block", "token", "dim")


def parse_axes(axes: str) -> tuple[str, ...]:
    """Split and check the axis names.

    Raises
    ------
    InvalidArgument
        For a name that is unknown, missing or there twice.
    """
    if not isinstance(axes, str):
        raise InvalidArgument(f"axes must be a string of names, not {type(axes).__name__}")
    names = tuple(axes.split())
    for name in names:
        if name not in KNOWN_AXES:
            raise InvalidArgument(f"axes {axes!r}: unknown axis {name!r}; the axes are {' '.join(KNOWN_AXES)}")
    for name in KNOWN_AXES:
        if names.count(name) > 1:
            raise InvalidArgument(f"axes {axes!r}: axis {name!r} appears twice")
    for name in REQUIRED_AXES:
        if name not in names:
            raise InvalidArgument(f"axes {axes!r}: axis {name!r} is missing")
    return names
