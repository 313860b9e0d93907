"""Hand the KV cache of a prefill to the worker that decodes, over shared memory, RDMA or TCP.

The names below are loaded when they are first used, so that ``import kvlink`` costs next to
nothing: neither numpy, msgspec, UCX nor the native module is touched by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlink import commands as commands
    from kvlink import errors as errors
    from kvlink.commands import Event as Event
    from kvlink.config import Limits as Limits
    from kvlink.errors import KvlinkError as KvlinkError
    from kvlink.handoff import BlockPool as BlockPool
    from kvlink.handoff import Node as Node
    from kvlink.handoff import Offer as Offer
    from kvlink.handoff import Pull as Pull
    from kvlink.handoff import Push as Push
    from kvlink.handoff import Slot as Slot
    from kvlink.handoff import TicketMint as TicketMint
    from kvlink.layout import KVCache as KVCache
    from kvlink.memory import Buffer as Buffer
    from kvlink.memory import empty as empty
    from kvlink.scheduler import DecodeService as DecodeService
    from kvlink.scheduler import DecodeWorker as DecodeWorker
    from kvlink.scheduler import Placement as Placement
    from kvlink.scheduler import Scheduler as Scheduler

__version__ = "0.1.0"

_HOME = {
    "BlockPool": "kvlink.handoff",
    "Buffer": "kvlink.memory",
    "DecodeService": "kvlink.scheduler",
    "DecodeWorker": "kvlink.scheduler",
    "KVCache": "kvlink.layout",
    "KvlinkError": "kvlink.errors",
    "Event": "kvlink.commands",
    "Limits": "kvlink.config",
    "Node": "kvlink.handoff",
    "Offer": "kvlink.handoff",
    "Placement": "kvlink.scheduler",
    "Pull": "kvlink.handoff",
    "Push": "kvlink.handoff",
    "Scheduler": "kvlink.scheduler",
    "Slot": "kvlink.handoff",
    "TicketMint": "kvlink.handoff",
    "empty": "kvlink.memory",
}

__all__ = [
    "BlockPool",
    "Buffer",
    "DecodeService",
    "DecodeWorker",
    "Event",
    "KVCache",
    "KvlinkError",
    "Limits",
    "Node",
    "Offer",
    "Placement",
    "Pull",
    "Push",
    "Scheduler",
    "Slot",
    "TicketMint",
    "__version__",
    "commands",
    "empty",
    "errors",
]


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it (PEP 562)."""
    from importlib import import_module

    if name in ("commands", "errors"):
        return import_module(f"kvlink.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvlink' has no attribute {name!r}")
    try:
        value = getattr(import_module(home), name)
    except ImportError as error:
        raise _without_extension(name) or error from None
    globals()[name] = value
    return value


def _without_extension(name: str) -> Exception | None:
    """Return what tells that `name` needs the compiled part and it is not there; None if it is."""
    from importlib.util import find_spec

    if find_spec("kvlink._native") is not None:
        return None
    from kvlink.errors import ConfigError

    return ConfigError(
        f"kvlink.{name} needs the compiled part of kvlink, and this installation has none: build it by installing "
        "kvlink with a C++20 compiler, or hand whole requests over with kvlink.fallback"
    )


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
