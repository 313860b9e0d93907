"""Stage 3: which UCX to load, how to configure it, and how many threads copy."""

from kvlink.transport.copy_threads import default_copy_threads
from kvlink.transport.devices import interface_of, rdma_devices
from kvlink.transport.find_ucx import UcxChoice, find_ucx
from kvlink.transport.open_ucx import open_ucx
from kvlink.transport.settings import UcxSettings, settings_for

__all__ = [
    "UcxChoice",
    "UcxSettings",
    "default_copy_threads",
    "find_ucx",
    "interface_of",
    "open_ucx",
    "rdma_devices",
    "settings_for",
]
