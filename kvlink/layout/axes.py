"""The ``axes`` argument: one name per tensor dimension."""

from __future__ import annotations

from kvlink.errors import InvalidArgument

__all__ = ["parse_axes"]

KNOWN_AXES = ("layer", "kv", "block", "slot", "token", "head", "dim")
REQUIRED_AXES = ("block", "token")
REQUIRED_AXES_OF_STATE = ("slot", "dim")


def parse_axes(axes: str) -> tuple[str, ...]:
    """Split and check the axis names. A tensor pages tokens in blocks, or holds the state of a request in a slot.

    Raises
    ------
    InvalidArgument
        For a name that is unknown, missing, there twice, or of the other kind of tensor.
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
    for name in REQUIRED_AXES_OF_STATE if "slot" in names else REQUIRED_AXES:
        if name not in names:
            raise InvalidArgument(f"axes {axes!r}: axis {name!r} is missing")
    for name in ("block", "token", "kv"):
        if "slot" in names and name in names:
            raise InvalidArgument(f"axes {axes!r}: a slot holds the state of a request, and has no axis {name!r}")
    return names
