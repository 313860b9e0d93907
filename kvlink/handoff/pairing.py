"""What the layouts of peers mean for this node: which part comes from which source, by which copies."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvlink.errors import InvalidArgument, ProtocolError
from kvlink.layout import CacheLayout, validate_layout
from kvlink.plan import Conversions, as_delivered, compile_conversion, compile_template, conversions_of, select
from kvlink.transport import mean_run_bytes

if TYPE_CHECKING:
    from kvlink._native import Conversion, Template

__all__ = ["Share", "Shares", "digest_of", "run_bytes_between", "template_between", "unpack_layout"]

_K = TypeVar("_K")
_V = TypeVar("_V")

# Some ranks of some fleets; a layout takes about 100 KiB, and so do all shares of one target together.
_LAYOUTS_KEPT = 1024
_SETS_KEPT = 256
_TEMPLATES_KEPT = 64
_UNPACKED_KEPT = 64


@dataclass(frozen=True, slots=True)
class Share:
    """What one source delivers: the target's layout, restricted to that and packed.

    Attributes
    ----------
    packed
        What the source is told. Parts that are to be converted lie in scratch memory, in the source's dtype.
    digest
        Of that, which within one life of the target says all.
    conversion
        From there to the target's own memory; ``None`` where nothing is converted.
    converts
        The pairs of dtypes of that.
    """

    packed: bytes
    digest: bytes
    conversion: Conversion | None = None
    converts: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, source: CacheLayout, share: CacheLayout) -> Share:
        """Return the share of `source`, which delivers what `share` has of the target's memory."""
        delivered = as_delivered(source, share)
        packed = msgspec.msgpack.encode(delivered)
        converts = tuple(sorted(conversions_of(delivered, share)))
        return cls(packed, digest_of(packed), compile_conversion(delivered, share), converts)


def digest_of(packed: bytes) -> bytes:
    """Return what a share is known by, from its layout as it crosses the wire."""
    return hashlib.blake2b(packed, digest_size=16).digest()


class Shares:
    """Elects which source delivers what to this node, and remembers it. Thread-safe.

    Sources are known by their epochs: the layout of a node does not change within one life.
    """

    def __init__(self, target: CacheLayout, *, epoch: bytes, converts: Conversions = frozenset()) -> None:
        self._target = target
        self._converts = converts
        # Readers differ in their epochs, so they spread over the replicas of what they share.
        self._seed = int.from_bytes(epoch[:8], "little")
        self._lock = threading.Lock()
        self._layouts: OrderedDict[bytes, bytes] = OrderedDict()
        self._elected: OrderedDict[tuple[bytes, ...], list[Share]] = OrderedDict()

    def layout_of(self, epoch: bytes) -> bytes | None:
        """Return the packed layout of a source, if it was learned and is remembered still."""
        with self._lock:
            return self._layouts.get(epoch)

    def learn(self, epoch: bytes, packed: bytes) -> None:
        """Remember the layout of a source."""
        with self._lock:
            _keep(self._layouts, epoch, packed, most=_LAYOUTS_KEPT)

    def known(self, epochs: tuple[bytes, ...]) -> list[Share] | None:
        """Return the share of each of `epochs`, if it was elected before."""
        with self._lock:
            shares = self._elected.get(epochs)
            if shares is not None:
                self._elected.move_to_end(epochs)
            return shares

    def elect(self, epochs: tuple[bytes, ...], packed: Sequence[bytes]) -> list[Share]:
        """Return what each of `epochs`, whose layouts are `packed`, delivers. May take milliseconds.

        Raises
        ------
        LayoutMismatch
            If together they cannot serve this node.
        ProtocolError
            If a layout contradicts itself.
        """
        layouts = [unpack_layout(one) for one in packed]
        chosen = select(layouts, self._target, seed=self._seed, converts=self._converts)
        shares = [Share.of(layout, share) for layout, share in zip(layouts, chosen, strict=True)]
        with self._lock:
            _keep(self._elected, epochs, shares, most=_SETS_KEPT)
        return shares


@functools.lru_cache(maxsize=_UNPACKED_KEPT)
def unpack_layout(packed: bytes) -> CacheLayout:
    """Return the layout that a peer told, once it is free of contradictions.

    Raises
    ------
    ProtocolError
        If it is not.
    """
    try:
        layout: CacheLayout = msgspec.msgpack.decode(packed, type=CacheLayout)
        validate_layout(layout)
    except (msgspec.DecodeError, RecursionError, InvalidArgument) as error:
        raise ProtocolError(f"the peer's layout contradicts itself: {error}") from None
    return layout


@functools.lru_cache(maxsize=_TEMPLATES_KEPT)
def template_between(packed_source: bytes, packed_target: bytes) -> Template:
    """Return the copies of one block pair. Kept: the peers of one fleet have few different layouts.

    Raises
    ------
    LayoutMismatch
        If the two caches cannot be paired.
    ProtocolError
        If a layout contradicts itself.
    """
    return compile_template(unpack_layout(packed_source), unpack_layout(packed_target))


@functools.lru_cache(maxsize=_TEMPLATES_KEPT)
def run_bytes_between(packed_source: bytes, packed_target: bytes) -> float:
    """Return how long the runs of ``template_between`` are, on average. Raises ``ProtocolError`` as it does."""
    return mean_run_bytes(unpack_layout(packed_source), unpack_layout(packed_target))


def _keep(memory: OrderedDict[_K, _V], key: _K, value: _V, *, most: int) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > most:
        memory.popitem(last=False)
