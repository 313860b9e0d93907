"""UCX by hand: one `ucp_put_nbx` a block, a flush, and a word that tells the target. See ucx_blocks.c."""

import base64
import ctypes
import os
import sys
from importlib.metadata import version
from pathlib import Path

import libucx
import numpy as np

libucx.load_library()
_LIBRARY = ctypes.CDLL(str(Path(sys.prefix, "lib", "kvlink_ucx_blocks.so")))
_LIBRARY.side_word.restype = ctypes.c_uint64
_LIBRARY.side_pack.restype = ctypes.c_long
_MOST_PACKED_BYTES = 1 << 16
_DEADLINE_S = 60.0
_PROGRESS_S = 0.0002


def _checked(status, operation):
    if status < 0:
        raise RuntimeError(f"{operation}: UCX status {status}")
    return status


class Driver:
    """One worker."""

    op = "put"

    def __init__(self, role, blocks):
        transports = os.environ.get("UCX_TLS", "all")
        self.about = f"UCX {version('libucx-cu12')}, one put a block, UCX_TLS={transports}"
        self.lane = f"ucx {transports}"
        self.role, self.blocks, self.round = role, blocks, 0
        size = ctypes.c_size_t(blocks.bytes.size)
        _checked(_LIBRARY.side_open(ctypes.c_void_p(blocks.address), size), "open")

    def address(self):
        packed = []
        for what in range(3):
            room = ctypes.create_string_buffer(_MOST_PACKED_BYTES)
            size = _checked(_LIBRARY.side_pack(what, room, ctypes.c_size_t(len(room))), "pack")
            packed.append(base64.b64encode(room.raw[:size]).decode())
        return {"packed": packed, "base": self.blocks.address, "word": _LIBRARY.side_word()}

    def connect(self, address):
        if self.role == "source":
            packed = [base64.b64decode(part) for part in address["packed"]]
            base, word = ctypes.c_uint64(address["base"]), ctypes.c_uint64(address["word"])
            _checked(_LIBRARY.side_connect(*packed, base, word), "connect")

    def prepare(self, source_offsets, target_offsets):
        self.sources, self.targets = (np.ascontiguousarray(side) for side in (source_offsets, target_offsets))
        self.round += 1

    def send(self):
        status = _LIBRARY.side_send(
            ctypes.c_void_p(self.blocks.address),
            ctypes.c_void_p(self.sources.ctypes.data),
            ctypes.c_void_p(self.targets.ctypes.data),
            ctypes.c_size_t(len(self.sources)),
            ctypes.c_size_t(self.blocks.block_bytes),
            ctypes.c_uint64(self.round),
            ctypes.c_double(_DEADLINE_S),
        )
        _checked(status, "put the blocks")

    def receive(self):
        _checked(_LIBRARY.side_receive(ctypes.c_uint64(self.round), ctypes.c_double(_DEADLINE_S)), "receive the word")

    def progress(self):
        _LIBRARY.side_progress(ctypes.c_double(_PROGRESS_S))
