"""Mooncake's transfer engine over TCP. The source writes in batches; the target learns of the end from its last block.

The wheel's default limits refuse more than about 2,050 blocks at once, so a request is cut into batches below that.
"""

import os
import time
from importlib.metadata import version

import numpy as np

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
from mooncake.engine import TransferEngine  # noqa: E402 - reads its environment when it is imported

_BATCH = 1024
_DEADLINE_S = 110.0


class Driver:
    """One engine."""

    op = "write"
    lane = "tcp"

    def __init__(self, role, blocks):
        self.role, self.blocks = role, blocks
        self.about = f"Mooncake transfer engine {version('mooncake-transfer-engine-non-cuda')}, batches of {_BATCH}"
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine does not start")
        # One word beyond the blocks tells the target that everything has come.
        self.word = np.zeros(512, dtype=np.uint64)
        for address, size in ((blocks.address, blocks.bytes.size), (self.word.ctypes.data, self.word.nbytes)):
            if self.engine.register_memory(address, size):
                raise RuntimeError("the memory is not registered")
        self.round = 0

    def address(self):
        return {
            "segment": f"127.0.0.1:{self.engine.get_rpc_port()}",
            "base": self.blocks.address,
            "word": self.word.ctypes.data,
        }

    def connect(self, address):
        self.peer = address

    def prepare(self, source_offsets, target_offsets):
        self.sources = (source_offsets + np.uint64(self.blocks.address)).tolist()
        self.targets = (target_offsets + np.uint64(self.peer["base"])).tolist()
        self.round += 1

    def send(self):
        segment, size = self.peer["segment"], self.blocks.block_bytes
        for first in range(0, len(self.sources), _BATCH):
            sources, targets = self.sources[first : first + _BATCH], self.targets[first : first + _BATCH]
            if self.engine.batch_transfer_sync_write(segment, sources, targets, [size] * len(sources)):
                raise RuntimeError("a batch was refused, or failed; the log says why")
        self.word[0] = self.round
        if self.engine.transfer_sync_write(segment, self.word.ctypes.data, self.peer["word"], 8):
            raise RuntimeError("the last word was refused")

    def receive(self):
        until = time.monotonic() + _DEADLINE_S
        while self.word[0] != self.round:
            if time.monotonic() > until:
                raise RuntimeError("the last word has not come")
            time.sleep(50e-6)  # its own threads receive
