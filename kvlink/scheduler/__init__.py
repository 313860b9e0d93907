"""Which decode worker a finished prefill goes to, and the whole way of handing it over."""

from __future__ import annotations

from kvlink.scheduler.book import DecodeWorker, Placement
from kvlink.scheduler.policies import LeastLoaded, MostRoom, Policy, PrefixAffinity, WorkerState
from kvlink.scheduler.reports import HandOffReport, Tried
from kvlink.scheduler.scheduler import Scheduler
from kvlink.scheduler.service import Allocator, Arrival, DecodeService, PoolAllocator, PrefixAllocator

__all__ = [
    "Allocator",
    "Arrival",
    "DecodeService",
    "DecodeWorker",
    "HandOffReport",
    "LeastLoaded",
    "MostRoom",
    "Placement",
    "Policy",
    "PoolAllocator",
    "PrefixAffinity",
    "PrefixAllocator",
    "Scheduler",
    "Tried",
    "WorkerState",
]
