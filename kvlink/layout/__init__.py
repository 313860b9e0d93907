"""Stage 1: where in memory a paged KV cache keeps each element.

An element has a global coordinate (group, layer, component, token, head, dim). A layout maps coordinates to
bytes through a block table, and is plain data that peers exchange. Nothing here moves or registers memory.
"""

from kvlink.layout.cache import KVCache
from kvlink.layout.geometry import CacheLayout, GroupLayout, PartLayout
from kvlink.layout.regions import Allocation, MemoryRegion
from kvlink.layout.validation import validate_layout

__all__ = [
    "Allocation",
    "CacheLayout",
    "GroupLayout",
    "KVCache",
    "MemoryRegion",
    "PartLayout",
    "validate_layout",
]
