"""What tests of engine adapters need: tagged KV elements, worker processes that always end, and faults on request."""

from kvlink.testing.faults import FaultCounts, FaultScript, inject_faults, remove_faults
from kvlink.testing.tokens import check_tokens, fill_tokens
from kvlink.testing.worker import Worker, WorkerFailed

__all__ = [
    "FaultCounts",
    "FaultScript",
    "Worker",
    "WorkerFailed",
    "check_tokens",
    "fill_tokens",
    "inject_faults",
    "remove_faults",
]
