"""``KvlinkConnector``: what vLLM calls. Decides nothing: each call goes to the half of its process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvlink.engines.vllm import stats
from kvlink.engines.vllm.config import ConnectorConfig
from kvlink.engines.vllm.layouts import Content, RankPlace, content_of, read_groups
from kvlink.engines.vllm.messages import StepOrders, WorkerFacts
from kvlink.engines.vllm.metrics import KvlinkPromMetrics, KvlinkStats
from kvlink.engines.vllm.params import EngineFacts
from kvlink.engines.vllm.scheduler import SchedulerFacts, SchedulerHalf
from kvlink.engines.vllm.worker import WorkerHalf
from kvlink.errors import ConfigError

__all__ = ["KvlinkConnector"]

# What says where a model came from and how it is stored, and not what it computes.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")


class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """Carries the orders of one step to the workers."""

    def __init__(self, orders: StepOrders) -> None:
        self.orders = orders


class _Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Carries the facts of one worker to the scheduler."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts


class KvlinkConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands KV cache over between vLLM engines; takes the place of ``NixlConnector``.

    Attributes
    ----------
    scheduler
        The half in the engine's scheduler, ``None`` in a worker.
    worker
        The half in a worker, ``None`` in the scheduler.

    Raises
    ------
    ConfigError
        If a setting is out of bounds, or the engine is parallel in a way that is not supported.
    UnsupportedMemory
        If the model keeps a cache that cannot be handed over.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        config = ConnectorConfig.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        _check_parallelism(vllm_config.parallel_config)
        self._groups = read_groups(kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerHalf(_scheduler_facts(vllm_config, self._groups), config)
        else:
            rank, world_size = _rank(vllm_config)
            engine_id = vllm_config.kv_transfer_config.engine_id
            self.worker = WorkerHalf(config, name=f"vllm-{engine_id}-{rank}"[:200], rank=rank, world_size=world_size)

    # What vLLM asks before there is a connector.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that moves in the fewest pieces when heads are split; any other works."""
        model = vllm_config.model_config
        if model is None or model.use_mla:
            return None
        return ConnectorConfig.of(vllm_config.kv_transfer_config.kv_connector_extra_config).layout

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvlinkStats:
        """Return statistics as they crossed from another process."""
        return KvlinkStats(data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: dict[Any, Any], *labels: Any) -> KvlinkPromMetrics:
        """Return the metrics ``vllm:kvlink_*``, with vLLM's `labels`: their names, and their values by engine."""
        return KvlinkPromMetrics(vllm_config, metric_types, *labels)

    @classmethod
    def supports_sleep_mode(cls, *args: Any) -> bool:
        """Return no: tickets name the life of a worker's node, which ends where its memory does."""
        return False

    # In the scheduler.

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Learn who the workers are."""
        self._scheduler().meet_workers({place: _facts(one) for place, one in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        """Look at a request that has just come."""
        self._scheduler().arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many more tokens can be pulled, which is done while the engine goes on."""
        return self._scheduler().matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return the groups that a pull fills."""
        return tuple(group.index for group in self._groups)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pull into the blocks that the request has."""
        tables = tuple(tuple(table) for table in blocks.get_block_ids())
        self._scheduler().allocated(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> _Metadata:
        """Return what workers must do."""
        scheduler = self._scheduler()
        if scheduler.pushing:
            self._tell_progress(scheduler, scheduler_output)
        return _Metadata(scheduler.take_orders())

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn what has arrived."""
        self._scheduler().received(tuple(connector_output.finished_recving or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether blocks stay for others to read, and what they must know for that."""
        return self._scheduler().finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether blocks stay for others to read, and what they must know for that."""
        return self._scheduler().finished(request, block_ids)

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Start the node over the worker's allocation."""
        model = self._vllm_config.model_config
        self._worker().register(
            kv_caches,
            self._groups,
            num_blocks=self._kv_cache_config.num_blocks,
            place=RankPlace(
                tp_rank=_tensor_rank(),
                tp_size=self._vllm_config.parallel_config.tensor_parallel_size,
                total_kv_heads=0 if model.use_mla else model.get_total_num_kv_heads(),
            ),
            content=lambda layer, tokens: self._content(layer, tokens, kv_caches[layer]),
            model=_fingerprint(model),
            one_group=len(self._kv_cache_config.kv_cache_groups) == 1,
        )

    def get_handshake_metadata(self) -> _Handshake:
        """Return what the scheduler must know of this worker."""
        return _Handshake(self._worker().facts)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: vLLM calls this before any of its layers is computed."""
        assert isinstance(kv_connector_metadata, _Metadata)
        self._worker().begin(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start what the scheduler has ordered."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        self._worker().start(metadata.orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled once all of its layers are here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Push what the layer has computed, where that is asked for; else blocks are read where they lie."""
        self._worker().layer_done(layer_name)

    def wait_for_save(self) -> None:
        """Do nothing: blocks are kept until they were read."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return which requests' blocks are free, or filled, and which of the latter are not right."""
        report = self._worker().poll()
        return KVConnectorTransferResults(
            finished_sending=report.sent, finished_recving=report.received, failed_recving=report.failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the same without failures, for callers that know no better."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that did not arrive, of models with one group."""
        return self._worker().take_bad_blocks()

    def get_kv_connector_stats(self) -> KvlinkStats | None:
        """Return what ended since the last call."""
        if self.worker is not None:
            counts = self.worker.take_tally()
        else:
            causes = self._scheduler().take_causes()
            counts = stats.added(stats.empty_counts(), {"failed": causes}) if causes else None
        return None if counts is None else KvlinkStats(counts)

    def shutdown(self) -> None:
        """End the node."""
        if self.worker is not None:
            self.worker.close()

    @staticmethod
    def _tell_progress(scheduler: SchedulerHalf, step: Any) -> None:
        """Tell which tokens of pushed prompts a step computes, and into which blocks."""
        cached = step.scheduled_cached_reqs
        for request_id in cached.resumed_req_ids & scheduler.pushing:
            scheduler.preempted(request_id)
        begins = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in scheduler.pushing & begins.keys():
            tables = step.kv_connector_block_state.get_block_ids(request_id)
            first = begins[request_id]
            if tables is not None:
                scheduler.scheduled(
                    request_id,
                    tuple(map(tuple, tables)),
                    range(first, first + step.num_scheduled_tokens.get(request_id, 0)),
                )

    def _scheduler(self) -> SchedulerHalf:
        assert self.scheduler is not None, "vLLM asks a worker for what only its scheduler knows"
        return self.scheduler

    def _worker(self) -> WorkerHalf:
        assert self.worker is not None, "vLLM asks its scheduler for what only a worker knows"
        return self.worker

    def _content(self, layer: str, tokens: int, tensor: Any) -> Content:
        module = self._vllm_config.compilation_config.static_forward_context[layer]
        return content_of(
            dtype=str(tensor.dtype).removeprefix("torch."),
            backend=module.get_attn_backend().get_name(),
            block_tokens=tokens,
            cache_dtype=str(self._vllm_config.cache_config.cache_dtype),
            isa=getattr(module, "isa", None),
        )


def _facts(metadata: KVConnectorHandshakeMetadata) -> WorkerFacts:
    assert isinstance(metadata, _Handshake)
    return metadata.facts


def _tensor_rank() -> int:
    from vllm.distributed.parallel_state import get_tp_group

    return int(get_tp_group().rank_in_group)


def _rank(vllm_config: Any) -> tuple[int, int]:
    """Return this worker's number within its engine, and how many there are."""
    from vllm.distributed.parallel_state import get_pp_group

    size = vllm_config.parallel_config.tensor_parallel_size
    stages = vllm_config.parallel_config.pipeline_parallel_size
    return int(get_pp_group().rank_in_group) * size + _tensor_rank(), size * stages


def _check_parallelism(parallel: Any) -> None:
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"KvlinkConnector: {name} is {getattr(parallel, name)}; ranks that hold every n-th token are not "
                "supported: use tensor or pipeline parallelism"
            )


def _scheduler_facts(vllm_config: Any, groups: Iterable[Any]) -> SchedulerFacts:
    parallel = vllm_config.parallel_config
    groups = tuple(groups)
    windowed = any(group.window is not None for group in groups)
    lookahead = int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0))
    return SchedulerFacts(
        engine=EngineFacts(
            engine_id=vllm_config.kv_transfer_config.engine_id,
            tp_size=parallel.tensor_parallel_size,
            dcp_size=getattr(parallel, "decode_context_parallel_size", 1),
            pp_size=parallel.pipeline_parallel_size,
        ),
        groups=groups,
        held_back_tokens=max(1 if windowed else 0, lookahead - 1),
    )


def _fingerprint(model: Any) -> str:
    """Return what both sides must agree on: the model's configuration, wherever its weights lie."""
    told = model.hf_text_config.to_dict()
    told = {key: value for key, value in told.items() if key not in _NOT_THE_MODEL}
    text = json.dumps([told, str(model.quantization)], sort_keys=True, default=str)
    return f"vllm {hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}"
