"""``kv_connector_extra_config``: what a user may choose, and in which bounds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvlink.config import Limits
from kvlink.errors import ConfigError
from kvlink.handoff.address import split_address
from kvlink.transport.lanes import check_lanes

__all__ = ["ConnectorConfig", "rank_address"]

_CALLED = "kv_connector_extra_config"
_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
_INTEGRITIES = ("crc32c", "xxh3")

# Least and greatest value. As in kvlink.Limits, the upper bounds are where a value starts being a slip of the unit.
_BOUNDS: dict[str, tuple[float, float]] = {
    "ttl_s": (0.001, 86400.0),
    "retry_s": (0.001, 86400.0),
    "deadline_s": (0.01, 86400.0),
    "connect_timeout_s": (0.01, 300.0),
    "lease_cap_s": (0.0, 86400.0),
    "close_deadline_s": (0.0, 300.0),
    "push_threshold_tokens": (0, (1 << 31) - 1),
    "window_bytes": (1 << 16, 1 << 50),
    "peer_window_bytes": (1 << 16, 1 << 50),
    "max_handoffs": (1, 1 << 20),
    "copy_threads": (1, 256),
}
_TEXTS = ("listen", "advertise", "secret", "secret_file", "secret_env", "integrity", "layout", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """The settings of one engine, checked.

    Attributes
    ----------
    listen
        ``host:port`` of each worker's node. With a port other than 0, rank n takes port + n.
    advertise
        Host, or ``host:port``, that tickets name instead; ports count on like those of `listen`.
    secret, secret_file, secret_env
        What the engines of a fleet share: itself, a file that has it, or a variable of the environment. vLLM writes
        its configuration to the log, so the latter two are better.
    lanes
        The only lanes that pulls may use; all by default.
    ttl_s
        How long prefill keeps a request's blocks for decode to begin reading them.
    retry_s
        How long prefill keeps them for another decode engine, once one that had begun to read them is gone.
    deadline_s
        How long decode waits for a request's bytes, from when it has blocks for them.
    connect_timeout_s
        How long connecting to another worker may take.
    lease_cap_s
        Past this age of an offer, readers that are still at it no longer keep it alive.
    close_deadline_s
        How long a worker that ends waits for its peers to be told.
    integrity
        ``"crc32c"`` or ``"xxh3"``: what arrives must have the checksums of what was sent.
    push
        Whether prefill pushes layer by layer where the router sends both sides their request at once.
    push_threshold_tokens
        Prompts shorter than this move at once, when they are computed.
    window_bytes, peer_window_bytes
        Bytes that may be on their way to one worker at once, and from one peer.
    max_handoffs
        Offers and pulls that may be live at once in a worker.
    copy_threads
        Threads that copy; as many as the process has cores by default.
    layout
        The layout of the KV cache that vLLM is asked for; ``None`` leaves it to vLLM.
    model
        A fingerprint of the model, in place of the one made of its configuration; both sides need the same.
    """

    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    secret: str | None = None
    secret_file: str | None = None
    secret_env: str | None = None
    lanes: tuple[str, ...] | None = None
    ttl_s: float = 30.0
    retry_s: float = 3.0
    deadline_s: float = 30.0
    connect_timeout_s: float = 3.0
    lease_cap_s: float = 300.0
    close_deadline_s: float = 2.0
    integrity: str | None = None
    push: bool = False
    push_threshold_tokens: int = 512
    window_bytes: int = 4 << 30
    peer_window_bytes: int = 1 << 30
    max_handoffs: int = 16384
    copy_threads: int | None = None
    layout: str | None = "LBHNC"
    model: str | None = None

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> ConnectorConfig:
        """Return the settings that `extra` makes of the defaults.

        Raises
        ------
        ConfigError
            If a key is unknown, or a value is of another type or out of its bounds; the message names both.
        """
        known = {field.name: field.type for field in fields(cls)}
        chosen: dict[str, Any] = {}
        for key, value in (extra or {}).items():
            if key not in known:
                raise ConfigError(f"{_CALLED}: there is no key {key!r}; the keys are {', '.join(known)}")
            chosen[key] = _checked(key, value, known[key])
        config = cls(**chosen)
        config._check_together()
        return config

    def _check_together(self) -> None:
        given = [name for name in ("secret", "secret_file", "secret_env") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{_CALLED}: {' and '.join(given)} are both given: one of them is enough")
        for name in ("listen", "advertise"):
            value = getattr(self, name)
            if value is not None and (name == "listen" or _has_port(value)):
                try:
                    split_address(value, lowest_port=0 if name == "listen" else 1)
                except ValueError as error:
                    raise ConfigError(f"{_CALLED}: {name} is {value!r}: {error}") from None

    def limits(self) -> Limits:
        """Return what a node takes of these settings."""
        return Limits(
            connect_timeout_s=self.connect_timeout_s,
            close_deadline_s=self.close_deadline_s,
            lease_cap_s=self.lease_cap_s,
            max_handoffs=self.max_handoffs,
            push_at_once_tokens=self.push_threshold_tokens,
            peer_window_bytes=self.peer_window_bytes,
            node_window_bytes=max(self.window_bytes, self.peer_window_bytes),
        )

    def read_secret(self, environment: Mapping[str, str] | None = None) -> bytes | None:
        """Return the secret from where it is, ``None`` without one.

        Raises
        ------
        ConfigError
            If the file cannot be read, the variable is not set, or either is empty.
        """
        environment = os.environ if environment is None else environment
        if self.secret_file is not None:
            try:
                found = Path(self.secret_file).read_bytes().strip()
            except OSError as error:
                raise ConfigError(f"{_CALLED}: secret_file {self.secret_file!r}: {error.strerror}") from None
        elif self.secret_env is not None:
            found = environment.get(self.secret_env, "").encode()
        elif self.secret is not None:
            return self.secret.encode()
        else:
            return None
        if not found:
            raise ConfigError(f"{_CALLED}: {self.secret_file or self.secret_env} has no secret")
        return found


def rank_address(address: str | None, rank: int) -> str | None:
    """Return `address` as rank `rank` of the engine has it: ports other than 0 count on."""
    if address is None or not _has_port(address):
        return address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank if int(port) else 0}"


def _has_port(address: str) -> bool:
    host, colon, port = address.rpartition(":")
    bare_ipv6 = ":" in host and not host.endswith("]")
    return bool(colon) and port.isdigit() and not bare_ipv6


def _checked(key: str, value: Any, annotation: Any) -> Any:
    optional = "None" in str(annotation)
    if value is None and optional:
        return None
    if key in _BOUNDS:
        return _number(key, value, whole="int" in str(annotation))
    if key == "lanes":
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise ConfigError(f"{_CALLED}: lanes must be a list of names, not {value!r}")
        return check_lanes(value)
    if key == "push":
        if not isinstance(value, bool):
            raise ConfigError(f"{_CALLED}: push must be true or false, not {value!r}")
        return value
    assert key in _TEXTS
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{_CALLED}: {key} must be text that is not empty, not {type(value).__name__}")
    choices = {"integrity": _INTEGRITIES, "layout": _LAYOUTS}.get(key)
    if choices is not None and value not in choices:
        raise ConfigError(f"{_CALLED}: {key} is {value!r}; choose from {', '.join(choices)}")
    return value


def _number(key: str, value: Any, *, whole: bool) -> Any:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ConfigError(f"{_CALLED}: {key} must be {'a whole number' if whole else 'a number'}, not {value!r}")
    low, high = _BOUNDS[key]
    if not low <= value <= high:  # also false for nan
        raise ConfigError(f"{_CALLED}: {key} is {value!r}, outside [{low:g}, {high:g}]")
    return value
