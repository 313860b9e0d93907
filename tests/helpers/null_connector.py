"""A connector of vLLM that moves nothing and says that all has come: what the engine itself takes for a hand-off.

Its answers are wrong, of course. Benchmarks subtract it; tests see that wrong KV makes wrong answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


@dataclass
class Waiting(KVConnectorMetadata):
    """The requests that wait for KV since this step."""

    requests: set[str] = field(default_factory=set)


class NullConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves; the constructor's arguments are vLLM's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._waiting: set[str] = set()
        self._come: set[str] = set()

    # What the scheduler asks.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        wanted = (request.kv_transfer_params or {}).get("do_remote_prefill")
        left = request.num_prompt_tokens - num_computed_tokens
        return (left, True) if wanted and left > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._waiting.add(request.request_id)
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> Waiting:
        waiting, self._waiting = self._waiting, set()
        return Waiting(waiting)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        asked = (request.kv_transfer_params or {}).get("do_remote_decode")
        return False, {"do_remote_prefill": True, "do_remote_decode": False} if asked else None

    request_finished_all_groups = request_finished

    # What a step of the worker asks.

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        self._come |= self._get_connector_metadata().requests

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        come, self._come = self._come, set()
        return None, come or None

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **named: Any) -> None: ...

    def wait_for_save(self) -> None: ...
