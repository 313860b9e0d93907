"""NIXL over its UCX backend. The source writes, and tells the target by the notification of that transfer.

Descriptors of all blocks are prepared once a pair of peers; a request picks from them by index.
"""

import base64
import time
from importlib.metadata import version

import numpy as np

try:
    from nixl._api import nixl_agent, nixl_agent_config
except ImportError:  # the wheel without its alias package
    from nixl_cu12._api import nixl_agent, nixl_agent_config

_DEADLINE_S = 110.0
_DONE = b"done"


def _version():
    for name in ("nixl-cu12", "nixl-cu13", "nixl"):
        try:
            return version(name)
        except ImportError:
            continue
    return "?"


class Driver:
    """One agent."""

    op = "write"

    def __init__(self, role, blocks, progress_thread):
        import os

        self.role, self.blocks = role, blocks
        # `nixl-default` is as shipped: nothing is said of the thread.
        options = {} if progress_thread else {"enable_prog_thread": False}
        self.agent = nixl_agent(role, nixl_agent_config(backends=["UCX"], **options))
        self.agent.register_memory([(blocks.address, blocks.bytes.size, 0, "")], "DRAM")
        transports = os.environ.get("UCX_TLS", "all")
        thread = "with its progress thread, as shipped" if progress_thread else "without its progress thread"
        self.about = f"NIXL {_version()}, {thread}, UCX_TLS={transports}"
        self.lane = f"ucx {transports}"
        self.peer = ""

    def address(self):
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "base": self.blocks.address}

    def connect(self, address):
        self.peer = self.agent.add_remote_agent(base64.b64decode(address["metadata"]))
        self.peer = self.peer.decode() if isinstance(self.peer, bytes) else self.peer
        if self.role == "source":
            self.local = self.agent.prep_xfer_dlist("", self._all(self.blocks.address), "DRAM")
            self.remote = self.agent.prep_xfer_dlist(self.peer, self._all(address["base"]), "DRAM")

    def _all(self, base):
        count = 2 * self.blocks.pool_blocks
        described = np.zeros((count, 3), dtype=np.uint64)
        described[:, 0] = base + np.arange(count, dtype=np.uint64) * np.uint64(self.blocks.block_bytes)
        described[:, 1] = self.blocks.block_bytes
        return described

    def prepare(self, source_offsets, target_offsets):
        size = np.uint64(self.blocks.block_bytes)
        self.sources, self.targets = (
            (offsets // size).astype(np.int32) for offsets in (source_offsets, target_offsets)
        )

    def send(self):
        began = time.perf_counter()
        handle = self.agent.make_prepped_xfer("WRITE", self.local, self.sources, self.remote, self.targets, _DONE)
        post_s = time.perf_counter() - began
        state = self.agent.transfer(handle)
        until = time.monotonic() + _DEADLINE_S
        while state != "DONE":
            if state == "ERR" or time.monotonic() > until:
                raise RuntimeError(f"the transfer is in state {state}")
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        return post_s

    def receive(self):
        until = time.monotonic() + _DEADLINE_S
        while not any(self.agent.get_new_notifs().values()):
            if time.monotonic() > until:
                raise RuntimeError("no notification came")
