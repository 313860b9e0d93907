"""What a worker tells its engine's scheduler about itself, once, so that tickets can be made there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvlink.errors import InvalidArgument
from kvlink.handoff.address import split_address
from kvlink.handoff.ticket import TicketSource

__all__ = ["GroupFacts", "NodeDescriptor", "parse_descriptor"]

DESCRIPTOR_VERSION = 1

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How one group is paged: all that block tables depend on, and nothing of where blocks lie.

    With ``slots``, a block is a slot of state that a request has as a whole.
    """

    name: _Text
    num_blocks: _Count
    block_tokens: _Count
    slots: bool = False


class NodeDescriptor(msgspec.Struct, frozen=True, kw_only=True):
    """Who a node is and how its cache is paged. Holds no key, no memory address and no layout.

    Attributes
    ----------
    kvlink
        Version of the descriptor's own form.
    name
        For messages to people.
    address
        ``host:port`` that tickets name.
    epoch
        The node's present life, in hexadecimal.
    groups
        The groups of its cache, in the order of their tables.
    """

    kvlink: Annotated[int, msgspec.Meta(ge=1, le=1)]
    name: _Text
    address: _Text
    epoch: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    groups: Annotated[list[GroupFacts], msgspec.Meta(min_length=1, max_length=64)]

    @property
    def source(self) -> TicketSource:
        """The node as tickets name it."""
        return TicketSource(name=self.name, address=self.address, epoch=self.epoch)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that survives JSON and msgpack."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


def parse_descriptor(descriptor: object) -> NodeDescriptor:
    """Return the fields of what ``Node.descriptor`` gave.

    Raises
    ------
    InvalidArgument
        If it is something else.
    """
    if not isinstance(descriptor, Mapping):
        raise InvalidArgument(f"a descriptor is the mapping that node.descriptor gives, not {descriptor!r:.80}")
    try:
        parsed: NodeDescriptor = msgspec.convert(dict(descriptor), NodeDescriptor, strict=True)
        split_address(parsed.address)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"not a descriptor: {error}; pass on exactly what node.descriptor gave") from None
    return parsed
