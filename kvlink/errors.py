"""Every exception that kvlink raises on purpose; the only list of them.

The native core names its failures by the same words (``csrc/kvlink/error.hpp``), and a peer names
its refusals by them on the wire, so ``error_class`` is the one way from a name to a class.
"""

from __future__ import annotations

from typing import NamedTuple


class FailedRange(NamedTuple):
    """Something that did not arrive, or not as it was: the KV heads and the tokens of one component of one layer.

    Heads are counted in the model, not in one rank's share of it, and tokens from the start of the request. What has
    no head axis (MLA latents, most state) counts as head 0. State of a request as a whole counts as its token 0.
    """

    group: str
    layer: str
    component: str
    first_head: int
    end_head: int
    first_token: int
    end_token: int


class KvlinkError(Exception):
    """What every error of kvlink derives from.

    An error that a pull ended with also says what did not arrive: ``failed`` covers all that was asked for and that its
    sources have not confirmed. It is empty for offers, and where nothing was started.

    ``valid_prefix_tokens`` counts the tokens from the start of the request whose bytes may be used, so that an engine
    recomputes no more than it must. After a pull that failed these are its ``skip_tokens``, which were there before:
    bytes may have come by then, but before the source has confirmed them none may be called right.
    """

    def __init__(
        self,
        message: str = "",
        *,
        failed: tuple[FailedRange, ...] = (),
        valid_prefix_tokens: int = 0,
    ) -> None:
        super().__init__(message)
        self.failed = failed
        self.valid_prefix_tokens = valid_prefix_tokens


class InvalidArgument(KvlinkError, ValueError):
    """The caller asked for something that cannot be right; nothing was started."""


class OutOfMemory(KvlinkError, MemoryError):
    """Memory, descriptors or another resource of the operating system ran out."""


class UcxUnavailable(KvlinkError):
    """No usable ``libucp.so.0`` was found, or it is too old."""


class TicketExpired(KvlinkError):
    """The offer's lease ended before the claim or before the bytes were confirmed."""


class AlreadyClaimed(KvlinkError):
    """As many readers as the offer allows have taken it already."""


class UnknownHandoff(KvlinkError):
    """The source does not know this handoff: it was cancelled, or never made."""


class NotOffered(KvlinkError):
    """The offer has a hole, or fewer tokens, where the target asked for bytes."""


class LayoutMismatch(KvlinkError, ValueError):
    """The two caches cannot be paired; the message names the field and both values.

    ``field``, ``source_value`` and ``target_value`` hold them apart from the message, as text.
    """

    def __init__(
        self,
        message: str = "",
        *,
        field: str = "",
        source_value: str = "",
        target_value: str = "",
        failed: tuple[FailedRange, ...] = (),
        valid_prefix_tokens: int = 0,
    ) -> None:
        super().__init__(message, failed=failed, valid_prefix_tokens=valid_prefix_tokens)
        self.field = field
        self.source_value = source_value
        self.target_value = target_value


class PeerUnreachable(KvlinkError, ConnectionError):
    """No connection to the peer could be made within the deadline."""


class PeerLost(KvlinkError, ConnectionError):
    """A connected peer died, or its connection broke."""


class StalePeer(KvlinkError):
    """Another life of the peer answers at this address: the ticket is of the one before."""


class DeadlineExceeded(KvlinkError, TimeoutError):
    """The outcome was not reached by the deadline."""


class Cancelled(KvlinkError):
    """One of the two sides cancelled the handoff."""


class Busy(KvlinkError):
    """A limit on handoffs or bytes in flight is reached; try again later."""


class LaneUnavailable(KvlinkError):
    """The lane that was required cannot be used between these two nodes."""


class BlocksBusy(KvlinkError):
    """Another live handoff holds a block that this one would write or read."""


class TransportFailed(KvlinkError):
    """Moving the bytes failed below kvlink, with the cause in the message."""


class ProtocolError(KvlinkError):
    """The peer sent something that the protocol does not allow."""


class DataCorrupted(KvlinkError):
    """What arrived has other checksums than what the source holds; ``failed`` names exactly what differs."""


class Closed(KvlinkError):
    """The node is closed, or was left behind by a fork."""


class NotReady(KvlinkError):
    """The node takes nothing new now: it is being drained, is suspended, or has too many blocks in quarantine.

    Ask another one, or later.
    """


class AuthenticationFailed(KvlinkError):
    """The two nodes do not share a secret."""


class VersionMismatch(KvlinkError):
    """The two nodes speak no common version of the protocol."""


class TicketInvalid(KvlinkError, ValueError):
    """The ticket is garbage, truncated, altered or of another version."""


class ConfigError(KvlinkError, ValueError):
    """A setting is out of its bounds, or contradicts another one."""


class NoGpu(KvlinkError):
    """GPU memory was asked for and this process can reach no GPU."""


class UnsupportedMemory(KvlinkError, TypeError):
    """The object gives no access to its memory that kvlink understands."""


_CLASSES: dict[str, type[KvlinkError]] = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, KvlinkError) and value is not KvlinkError
}

__all__ = [
    "AlreadyClaimed",
    "AuthenticationFailed",
    "BlocksBusy",
    "Busy",
    "Cancelled",
    "Closed",
    "ConfigError",
    "DataCorrupted",
    "DeadlineExceeded",
    "FailedRange",
    "InvalidArgument",
    "KvlinkError",
    "LaneUnavailable",
    "LayoutMismatch",
    "NoGpu",
    "NotOffered",
    "NotReady",
    "OutOfMemory",
    "PeerLost",
    "PeerUnreachable",
    "ProtocolError",
    "StalePeer",
    "TicketExpired",
    "TicketInvalid",
    "TransportFailed",
    "UcxUnavailable",
    "UnknownHandoff",
    "UnsupportedMemory",
    "VersionMismatch",
    "error_class",
]


def error_class(name: str) -> type[KvlinkError]:
    """Return the class called `name`, or ``ProtocolError`` for a name that this version lacks.

    A newer peer may refuse with a class that is unknown here; its message still tells why.
    """
    return _CLASSES.get(name, ProtocolError)
