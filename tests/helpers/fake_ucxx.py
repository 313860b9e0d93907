"""What `ucxx` and `ucp` offer of the same names, over TCP sockets of asyncio: for where neither is to be had."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np


class FakeEndpoint:
    """Messages keep their edges, as in UCX: a buffer of another size is an error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, buffer: Any) -> None:
        data = np.ascontiguousarray(buffer).view(np.uint8).tobytes()
        self._writer.write(len(data).to_bytes(8, "little") + data)
        await self._writer.drain()

    async def recv(self, buffer: Any) -> None:
        size = int.from_bytes(await self._reader.readexactly(8), "little")
        if size != buffer.nbytes:
            raise ValueError(f"Message truncated: {size} bytes into {buffer.nbytes}")
        buffer[:] = np.frombuffer(await self._reader.readexactly(size), dtype=np.uint8)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


class FakeListener:
    def __init__(self, callback: Callable[[FakeEndpoint], Awaitable[None]], port: int) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self._server: asyncio.Server | None = None

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await callback(FakeEndpoint(reader, writer))

        async def start() -> None:
            self._server = await asyncio.start_server(serve, sock=self._socket)

        self._starting = asyncio.get_running_loop().create_task(start())

    def close(self) -> None:
        self._starting.cancel()
        if self._server is not None:
            self._server.close()
        self._socket.close()


def create_listener(callback_func: Callable[[FakeEndpoint], Awaitable[None]], port: int = 0) -> FakeListener:
    """As `ucxx.create_listener`: at once, inside of a running loop."""
    return FakeListener(callback_func, port)


async def create_endpoint(host: str, port: int) -> FakeEndpoint:
    """As `ucxx.create_endpoint`."""
    return FakeEndpoint(*await asyncio.open_connection(host, port))
