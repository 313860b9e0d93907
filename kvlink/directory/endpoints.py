"""Talking to one etcd out of several, in one thread."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from kvlink.errors import ConfigError

if TYPE_CHECKING:
    from etcd3gw.client import Etcd3Client

__all__ = ["Backoff", "Certificates", "Endpoint", "EtcdConnection", "EtcdFailed", "parse_endpoints"]

_T = TypeVar("_T")

Endpoint = tuple[str, str, int]
"""Protocol, host and port."""

_USUAL_PORT = 2379


class EtcdFailed(Exception):
    """etcd cannot be reached, or does not do what it was asked. Stays inside ``kvlink.directory``.

    ``answered`` tells the second from the first.
    """

    def __init__(self, message: str, *, answered: bool) -> None:
        super().__init__(message)
        self.answered = answered


def parse_endpoints(texts: Sequence[str]) -> list[Endpoint]:
    """Return the endpoints that `texts` name, as ``host``, ``host:port`` or with ``http://`` or ``https://`` before.

    Raises
    ------
    ConfigError
        If there is none, or one is malformed, or the package that talks to them is missing.
    """
    if isinstance(texts, str) or not texts:
        raise ConfigError(f"etcd: endpoints must be a list of host:port, not {texts!r}")
    try:
        import etcd3gw  # noqa: F401
    except ImportError:
        raise ConfigError("etcd: the package etcd3gw is missing: install kvlink[etcd]") from None
    return [_parse(text) for text in texts]


def _parse(text: str) -> Endpoint:
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port or _USUAL_PORT
    except ValueError as error:
        raise ConfigError(f"etcd: endpoint {text!r}: {error}") from None
    if not host or parts.scheme not in ("http", "https") or parts.path not in ("", "/"):
        raise ConfigError(f"etcd: endpoint {text!r} is not host:port")
    return parts.scheme, host, port


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Paths of PEM files, for endpoints that begin with ``https://``.

    Attributes
    ----------
    authority
        Of whoever has signed etcd's certificate; ``None``: the authorities that ``requests`` knows.
    own
        This side's certificate and its key, where etcd asks for one.
    """

    authority: str | None = None
    own: tuple[str, str] | None = None


class Backoff:
    """How long to wait after one more failure: twice as long each time, up to a second, and never just that."""

    def __init__(self, *, first_s: float = 0.05, most_s: float = 1.0) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def reset(self) -> None:
        """Begin anew, since something has worked."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Return how long to wait now."""
        now_s, self._next_s = self._next_s, min(2 * self._next_s, self._most_s)
        return now_s * random.uniform(0.5, 1.0)


class EtcdConnection:
    """A connection of one thread, to another endpoint after each failure."""

    def __init__(self, endpoints: Sequence[Endpoint], *, timeout_s: float, certificates: Certificates) -> None:
        self._endpoints = endpoints
        self._certificates = certificates
        self._timeout_s = timeout_s
        self._number = random.randrange(len(endpoints))
        self._client: Etcd3Client | None = None

    @property
    def endpoint(self) -> str:
        """The one in use, for messages."""
        protocol, host, port = self._endpoints[self._number]
        return f"{protocol}://{host}:{port}"

    def call(self, work: Callable[[Etcd3Client], _T]) -> _T:
        """Return what `work` does with the client.

        Raises
        ------
        EtcdFailed
            With the cause. The next call goes to another endpoint if this one did not answer.
        """
        from etcd3gw import exceptions
        from requests import RequestException

        try:
            return work(self._connected())
        except (
            exceptions.ConnectionFailedError,
            exceptions.ConnectionTimeoutError,
            RequestException,
            OSError,
        ) as error:
            failure = EtcdFailed(f"{self.endpoint}: {error}", answered=False)
        except (exceptions.Etcd3Exception, ValueError, KeyError, TypeError, AttributeError) as error:
            failure = EtcdFailed(f"{self.endpoint}: {type(error).__name__}: {error}", answered=True)
        self.close()
        if not failure.answered:
            self._number = (self._number + 1) % len(self._endpoints)
        raise failure from None

    def close(self) -> None:
        """Let go of the socket; the next call makes a new one."""
        if self._client is not None:
            self._client.session.close()
            self._client = None

    def _connected(self) -> Etcd3Client:
        if self._client is None:
            import requests
            from etcd3gw.client import Etcd3Client

            session: Any = requests.Session()
            session.trust_env = False  # etcd is inside: no proxy of the environment leads to it
            session.verify = self._certificates.authority or True
            session.cert = self._certificates.own
            protocol, host, port = self._endpoints[self._number]
            self._client = Etcd3Client(
                host=host, port=port, protocol=protocol, timeout=self._timeout_s, session=session
            )
        return self._client
