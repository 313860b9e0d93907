"""Tickets made where no node is: in an engine's scheduler, for handoffs that its workers will offer.

Pure: no socket, no native code. The scheduler makes a ticket and sends it both ways, to the ranks
that will offer their blocks under it and to whoever will pull. A claim may reach a rank before its
offer does, and waits there.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvlink.errors import InvalidArgument
from kvlink.handoff.arguments import check_count, check_milliseconds
from kvlink.handoff.descriptor import NodeDescriptor, parse_descriptor
from kvlink.handoff.ticket import MOST_SOURCES, make_ticket

__all__ = ["MOST_READERS", "MOST_TOKENS", "TicketMint"]

MOST_TOKENS = (1 << 31) - 1
MOST_READERS = 1 << 16

_EPOCH_BYTES = 16


class TicketMint:
    """Makes tickets over the ranks of one engine: tensor, pipeline and data parallel ones. Thread-safe.

    Every mint has an epoch of its own, so that tickets of two schedulers, or of two lives of one,
    are never mistaken for each other. A rank that restarts has another descriptor, and needs
    another mint.

    Parameters
    ----------
    descriptors
        ``node.descriptor`` of each rank; a rank is its position in this list.

    Raises
    ------
    InvalidArgument
        If there is none, one is malformed, or one appears twice.
    """

    def __init__(self, descriptors: Iterable[Mapping[str, Any]]) -> None:
        self._ranks = [parse_descriptor(descriptor) for descriptor in descriptors]
        if not 1 <= len(self._ranks) <= MOST_SOURCES:
            raise InvalidArgument(f"mint: {len(self._ranks)} descriptors; give 1 to {MOST_SOURCES}")
        if len({rank.epoch for rank in self._ranks}) != len(self._ranks):
            raise InvalidArgument("mint: a node appears twice among the descriptors")
        self._epoch = os.urandom(_EPOCH_BYTES)
        self._sequences = itertools.count(1)

    def __repr__(self) -> str:
        """Name the ranks."""
        return f"<kvlink.TicketMint over {', '.join(rank.name for rank in self._ranks)}>"

    @property
    def epoch(self) -> str:
        """What the ids of its tickets begin with, in hexadecimal."""
        return self._epoch.hex()

    def offer(
        self, *, num_tokens: int, readers: int = 1, ttl_s: float = 30.0, ranks: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return a fresh ticket for `num_tokens` tokens that `readers` ranks of the other side will pull.

        Every one of `ranks`, all by default, has to offer its blocks under it:
        ``node.offer(blocks, ticket=ticket)``. A pull takes from each what only that one has, and
        from replicas in turn; it takes the payload of the first. Each rank keeps its offer for
        `ttl_s` seconds from then on.

        Raises
        ------
        InvalidArgument
            If an argument is out of bounds, or a rank does not exist or appears twice.
        """
        chosen = self._chosen(ranks)
        return make_ticket(
            epoch=self._epoch,
            sequence=next(self._sequences),
            sources=[rank.source for rank in chosen],
            num_tokens=check_count(num_tokens, low=0, high=MOST_TOKENS, called="mint: num_tokens"),
            groups=list(dict.fromkeys(group.name for rank in chosen for group in rank.groups)),
            readers=check_count(readers, low=1, high=MOST_READERS, called="mint: readers"),
            ttl_ms=check_milliseconds(ttl_s, called="mint: ttl_s"),
        )

    def _chosen(self, ranks: Sequence[int] | None) -> list[NodeDescriptor]:
        if ranks is None:
            return self._ranks
        highest = len(self._ranks) - 1
        numbers = [check_count(rank, low=0, high=highest, called="mint: a rank") for rank in ranks]
        if not numbers or len(set(numbers)) != len(numbers):
            raise InvalidArgument(f"mint: ranks={numbers!r:.80} must name at least one rank, and none twice")
        return [self._ranks[number] for number in numbers]
