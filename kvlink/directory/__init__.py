"""Which decode workers there are, and how they stand: a static list, or etcd with leases.

A directory only tells. What it says of free blocks is a hint that may be a moment old; a worker
itself decides what it takes.
"""

from __future__ import annotations

from kvlink.directory.etcd import EtcdDirectory
from kvlink.directory.listing import Directory, Listing, Registration, StaticDirectory, WorkerEntry

__all__ = ["Directory", "EtcdDirectory", "Listing", "Registration", "StaticDirectory", "WorkerEntry"]
