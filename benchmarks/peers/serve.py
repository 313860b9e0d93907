"""One side of a peer, in the environment of `make peers`: obeys lines of JSON on a socket that it inherits.

    serve.py DRIVER --check     exits 0 if the driver's library can be imported
    serve.py DRIVER DESCRIPTOR  serves requests until the socket ends

Needs only NumPy, and the library that the driver imports.
"""

import base64
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback

import numpy as np
from blocks import Blocks

_PR_SET_PDEATHSIG = 1

DRIVERS = {
    "ucx": ("ucx_driver", {}),
    "ucxx": ("ucxx_driver", {}),
    "nixl": ("nixl_driver", {"progress_thread": False}),
    "nixl-default": ("nixl_driver", {"progress_thread": True}),
    "mooncake": ("mooncake_driver", {}),
}


class Side:
    """Answers the requests of one process, by a driver."""

    def __init__(self, name):
        module, self.arguments = DRIVERS[name]
        self.make = importlib.import_module(module).Driver
        self.blocks = self.driver = self.tables = None
        self.role = ""

    def open(self, role, block_bytes, pool_blocks, entries, seed):
        self.role = role
        self.blocks = Blocks(block_bytes=block_bytes, pool_blocks=pool_blocks, entries=entries, seed=seed)
        if role == "source":
            self.blocks.fill()
        else:
            self.blocks.forget()
        self.driver = self.make(role, self.blocks, **self.arguments)
        return {"op": self.driver.op, "about": self.driver.about, "address": self.driver.address()}

    def connect(self, address):
        self.driver.connect(address)

    def prepare(self, source, target):
        self.tables = tuple(np.frombuffer(base64.b64decode(table), dtype="<i4") for table in (source, target))
        if self.role == "target":
            self.blocks.forget()
        self.driver.prepare(*(self.blocks.offsets(table) for table in self.tables))

    def move(self):
        cpu_started, began = time.process_time(), time.perf_counter()
        post_s = self.driver.send() if self.role == "source" else self.driver.receive()
        ended = time.perf_counter()
        cpu_s = time.process_time() - cpu_started
        return {"began": began, "ended": ended, "cpu_s": cpu_s, "post_s": post_s, "lane": self.driver.lane}

    def verify(self):
        return self.blocks.holds(*self.tables)


def serve(name, descriptor):
    # It may be stopped when whoever asks is killed, and would then not see the end of the socket.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    side = Side(name)
    with socket.socket(fileno=descriptor) as link, link.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"result": getattr(side, request.pop("operation"))(**request)}
            except Exception as error:  # noqa: BLE001 - the top of the process: everything goes to whoever asked
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
            while hasattr(side.driver, "progress") and not select.select([link], [], [], 0)[0]:
                side.driver.progress()  # the other side may still need this one


if __name__ == "__main__":
    code = 0
    try:
        if sys.argv[2] == "--check":
            Side(sys.argv[1])
        else:
            serve(sys.argv[1], int(sys.argv[2]))
    except Exception:  # noqa: BLE001 - as above
        traceback.print_exc()
        code = 1
    # Some of these libraries crash in their destructors at a normal exit.
    sys.stderr.flush()
    os._exit(code)
