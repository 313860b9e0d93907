"""UCXX from Python: the source gathers blocks into large messages by NumPy, the target scatters them.

One message a block would measure the interpreter. Eight messages are under way at a time.
"""

import asyncio
import os
from importlib.metadata import version

import numpy as np
import ucxx

_MESSAGE_BYTES = 1 << 20
_AT_ONCE = 8
_DEADLINE_S = 110.0


class Driver:
    """A listener on the target, an endpoint on the source."""

    op = "send"

    def __init__(self, role, blocks):
        transports = os.environ.get("UCX_TLS", "all")
        self.about = f"UCXX {version('ucxx-cu12')}, gathered and scattered by NumPy, UCX_TLS={transports}"
        self.lane = f"ucx {transports}"
        self.role, self.blocks = role, blocks
        self.rows = blocks.bytes.reshape(-1, blocks.block_bytes)
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.accepted = self.loop.create_future()
        self.listener = None
        if role == "target":
            self.run(self._listen())
        each = max(1, _MESSAGE_BYTES // blocks.block_bytes)
        self.buffers = [np.empty((each, blocks.block_bytes), dtype=np.uint8) for _ in range(_AT_ONCE)]
        self.each = each

    def run(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, _DEADLINE_S))

    async def _listen(self):
        async def accept(endpoint):
            self.accepted.set_result(endpoint)
            await asyncio.sleep(0)

        self.listener = ucxx.create_listener(accept, port=0)

    def address(self):
        return {"port": self.listener.port if self.listener else 0}

    def connect(self, address):
        async def reach():
            if self.role == "source":
                return await ucxx.create_endpoint("127.0.0.1", address["port"])
            return await self.accepted

        self.endpoint = self.run(reach())

    def prepare(self, source_offsets, target_offsets):
        offsets = source_offsets if self.role == "source" else target_offsets
        rows = (offsets // np.uint64(self.blocks.block_bytes)).astype(np.int64)
        self.pieces = [rows[first : first + self.each] for first in range(0, len(rows), self.each)]

    def send(self):
        async def all_pieces():
            free = list(range(_AT_ONCE))
            under_way = []
            for rows in self.pieces:
                if not free:
                    slot, sending = under_way.pop(0)
                    await sending
                    free.append(slot)
                slot = free.pop(0)
                buffer = self.buffers[slot][: len(rows)]
                np.take(self.rows, rows, axis=0, out=buffer)
                under_way.append((slot, asyncio.ensure_future(self.endpoint.send(buffer))))
                await asyncio.sleep(0)
            for _, sending in under_way:
                await sending
            end = np.zeros(1, dtype=np.uint8)
            await self.endpoint.recv(end)

        self.run(all_pieces())

    def receive(self):
        async def all_pieces():
            waiting = []

            def post(number):
                buffer = self.buffers[number % _AT_ONCE][: len(self.pieces[number])]
                waiting.append((buffer, asyncio.ensure_future(self.endpoint.recv(buffer))))

            for number in range(min(_AT_ONCE, len(self.pieces))):
                post(number)
            for number, rows in enumerate(self.pieces):
                buffer, receiving = waiting.pop(0)
                await receiving
                self.rows[rows] = buffer
                if number + _AT_ONCE < len(self.pieces):
                    post(number + _AT_ONCE)
            await self.endpoint.send(np.zeros(1, dtype=np.uint8))

        self.run(all_pieces())
