"""Stage 3: which UCX to load, how to configure it, which lane is fastest, and how many threads copy."""

from kvlink.transport.copy_threads import default_copy_threads
from kvlink.transport.devices import interface_of, rdma_devices
from kvlink.transport.find_ucx import UcxChoice, find_ucx
from kvlink.transport.lanes import LANES, LaneChoice, LaneFacts, check_lanes, choose_lanes
from kvlink.transport.open_ucx import open_ucx
from kvlink.transport.run_lengths import mean_run_bytes
from kvlink.transport.settings import UcxSettings, settings_for

__all__ = [
    "LANES",
    "LaneChoice",
    "LaneFacts",
    "UcxChoice",
    "UcxSettings",
    "check_lanes",
    "choose_lanes",
    "default_copy_threads",
    "find_ucx",
    "interface_of",
    "mean_run_bytes",
    "open_ucx",
    "rdma_devices",
    "settings_for",
]
