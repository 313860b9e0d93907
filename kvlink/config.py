"""The limits and timeouts of one node, with their bounds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvlink.errors import ConfigError

__all__ = ["Limits"]

# Least and greatest value of each field. The upper bounds are where a value stops being a choice
# and starts being a slip of the unit (milliseconds given for seconds, bytes for mebibytes).
_BOUNDS: dict[str, tuple[float, float]] = {
    "connect_timeout_s": (0.01, 300.0),
    "handshake_timeout_s": (0.01, 60.0),
    "close_deadline_s": (0.0, 300.0),
    "pending_handshakes": (1, 4096),
    "pending_connects": (1, 4096),
    "ask_sessions": (1, 4096),
    "lease_cap_s": (0.0, 86400.0),
    "max_handoffs": (1, 1 << 20),
    "payload_bytes": (0, 4 << 20),
    "push_at_once_tokens": (0, (1 << 31) - 1),
    "peer_window_bytes": (1, 1 << 50),
    "node_window_bytes": (1, 1 << 50),
    "quarantined_blocks": (0, 1 << 40),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one node allows itself and its peers.

    Attributes
    ----------
    connect_timeout_s
        Longest time that connecting to one peer may take, whatever the pulls allow that wait
        for it.
    handshake_timeout_s
        Longest time from accepting a connection to its last handshake message. A dialer that
        sends slower than that is cut off.
    close_deadline_s
        How long ``Node.close`` waits for peers to be told, when the caller names no deadline.
    pending_handshakes
        Accepted connections that may be in the handshake at once. When a further one arrives,
        the oldest that has not proved the secret yet is cut off in its favour.
    pending_connects
        Peers that may be dialed at once; a pull that needs another one gets ``Busy``. All sources
        of one ticket are admitted together, however many they are.
    ask_sessions
        Connections on which peers may ask something at once. When a further one is needed, the one that
        has been idle longest ends; without an idle one the peer gets ``Busy``.
    lease_cap_s
        Readers that are still at it renew the lease of an offer, but never past this age of it.
        ``ttl_s`` may be longer: such an offer is not renewed, and ends by its own ``ttl_s``.
    max_handoffs
        Offers and pulls that may be live at once; a further one gets ``Busy``.
    payload_bytes
        Largest payload of one offer, or of one push.
    push_at_once_tokens
        Pushes of fewer tokens move at once when they are committed, whatever was said to be ready before.
    peer_window_bytes
        Bytes of pulls from one peer that may move at once. Further pulls wait in their order; one
        that is larger moves while no other of that peer does.
    node_window_bytes
        The same over all peers, who take turns.
    quarantined_blocks
        Blocks of pulls that have their outcome while something may still write them. While there
        are more, new pulls get ``NotReady``. The default is several of the longest requests, so
        that cancelling one or two does not close the node.
    """

    connect_timeout_s: float = 5.0
    handshake_timeout_s: float = 5.0
    close_deadline_s: float = 2.0
    pending_handshakes: int = 128
    pending_connects: int = 64
    ask_sessions: int = 256
    lease_cap_s: float = 300.0
    max_handoffs: int = 16384
    payload_bytes: int = 1 << 20
    push_at_once_tokens: int = 512
    peer_window_bytes: int = 1 << 30
    node_window_bytes: int = 4 << 30
    quarantined_blocks: int = 16384

    def __post_init__(self) -> None:
        """Refuse a value of another type or out of its bounds."""
        for field in fields(self):
            _check(field.name, getattr(self, field.name), whole=field.type == "int")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Limits:
        """Return the limits with each ``KVLINK_<FIELD>`` of the environment applied.

        Nothing calls this on its own: pass the result as ``Node(limits=...)``. `env` stands in
        for ``os.environ`` when given.

        Raises
        ------
        ConfigError
            If a value is not a number or is out of its bounds; the message names the variable.
        """
        env = os.environ if env is None else env
        chosen: dict[str, int | float] = {}
        for field in fields(cls):
            variable = f"KVLINK_{field.name.upper()}"
            text = env.get(variable)
            if text is None:
                continue
            whole = field.type == "int"
            try:
                value = int(text) if whole else float(text)
            except ValueError:
                kind = "a whole number" if whole else "a number"
                raise ConfigError(f"{variable}={text!r} is not {kind}") from None
            _check(field.name, value, whole=whole, called=variable)
            chosen[field.name] = value
        return cls(**chosen)  # type: ignore[arg-type]  # _check has just made sure of the types


def _check(name: str, value: object, *, whole: bool, called: str | None = None) -> None:
    called = called or f"limits.{name}"
    expected = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, expected):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{called} must be {kind}, not {value!r}")
    low, high = _BOUNDS[name]
    if not low <= value <= high:  # also false for nan
        raise ConfigError(f"{called} is {value!r}, outside [{low:g}, {high:g}]")
