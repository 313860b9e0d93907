"""Two-sided messages over UCX from Python: `ucxx`, or `ucp` of ucx-py, whose calls are the same.

Neither offers one-sided operations with keys, so both sides take part in every byte. What is built
on this needs no compiled part of kvlink.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvlink.errors import ProtocolError, UcxUnavailable

__all__ = ["Bytes", "Endpoint", "Listener", "TwoSided", "load_two_sided", "receive_frame", "send_frame"]

Bytes = npt.NDArray[np.uint8]
"""What endpoints send, and receive into."""

_NAMES = ("ucxx", "ucp")
_LENGTH_BYTES = 8


class Endpoint(Protocol):
    """One connection. Messages arrive whole and in their order, each into a buffer of its size."""

    async def send(self, buffer: Any) -> Any:
        """Send one message."""
        ...

    async def recv(self, buffer: Any) -> Any:
        """Receive one message of exactly the buffer's size."""
        ...

    async def close(self) -> None:
        """End the connection."""
        ...


class Listener(Protocol):
    """Accepts connections until it is closed."""

    @property
    def port(self) -> int:
        """Where."""
        ...

    def close(self) -> None:
        """Accept no more."""
        ...


class TwoSided(Protocol):
    """The calls that `ucxx` and `ucp` share."""

    def create_listener(self, callback_func: Callable[[Endpoint], Awaitable[None]], port: int = 0) -> Listener:
        """Listen on every interface, and call back with the endpoint of each connection."""
        ...

    async def create_endpoint(self, host: str, port: int) -> Endpoint:
        """Connect."""
        ...


def load_two_sided() -> TwoSided:
    """Return `ucxx`, else `ucp`.

    Raises
    ------
    UcxUnavailable
        If neither can be imported; the message says why.
    """
    causes = []
    for name in _NAMES:
        try:
            return cast(TwoSided, importlib.import_module(name))
        except ImportError as error:
            causes.append(f"{name}: {error}")
    raise UcxUnavailable(f"the Python transport needs ucxx or ucx-py ({'; '.join(causes)}): pip install 'kvlink[ucxx]'")


async def send_frame(endpoint: Endpoint, body: bytes) -> None:
    """Send so many bytes, and before them how many they are."""
    await endpoint.send(np.frombuffer(len(body).to_bytes(_LENGTH_BYTES, "little"), dtype=np.uint8).copy())
    if body:
        await endpoint.send(np.frombuffer(body, dtype=np.uint8).copy())


async def receive_frame(endpoint: Endpoint, *, most: int) -> bytes:
    """Return what ``send_frame`` sent.

    Raises
    ------
    ProtocolError
        If it is longer than `most`.
    """
    length: Bytes = np.empty(_LENGTH_BYTES, dtype=np.uint8)
    await endpoint.recv(length)
    size = int.from_bytes(length.tobytes(), "little")
    if size > most:
        raise ProtocolError(f"the peer announced a message of {size} bytes where {most} are the most")
    body: Bytes = np.empty(size, dtype=np.uint8)
    if size:
        await endpoint.recv(body)
    return body.tobytes()
