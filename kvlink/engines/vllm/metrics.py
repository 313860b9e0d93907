"""vLLM's own classes for what is counted: statistics on their way to the front end, and Prometheus metrics there."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvlink.engines.vllm import stats

__all__ = ["KvlinkPromMetrics", "KvlinkStats"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_BYTES = tuple(float(1 << exponent) for exponent in range(12, 37, 2))
_BLOCKS = tuple(float(1 << exponent) for exponent in range(0, 16, 1))


class KvlinkStats(KVConnectorStats):  # type: ignore[misc]
    """What ended since the last step, see ``kvlink.engines.vllm.stats``."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or stats.empty_counts())

    def reset(self) -> None:
        """Forget everything."""
        self.data = stats.empty_counts()

    def aggregate(self, other: KVConnectorStats) -> KvlinkStats:
        """Return the counts of both together."""
        return KvlinkStats(stats.added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Return a line for the log."""
        return stats.summary(self.data)

    def is_empty(self) -> bool:
        """Whether nothing ended."""
        return stats.is_empty(self.data)


class KvlinkPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics ``vllm:kvlink_*``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._seconds = self._histogram("pull_seconds", "Seconds that pulls of KV cache took.", _SECONDS)
        self._bytes = self._histogram("pull_bytes", "Bytes of KV cache that pulls brought.", _BYTES)
        self._blocks = self._histogram("pull_blocks", "Blocks of KV cache that pulls filled.", _BLOCKS)
        self._phases = self._histogram("pull_phase_seconds", "Seconds of pulls, by phase.", _SECONDS, "phase")
        self._pulls = self._counter("pulls", "Pulls of KV cache that succeeded, by lane.", "lane")
        self._failed = self._counter("pulls_failed", "Pulls of KV cache that failed, by cause.", "cause")
        self._read = self._counter("offers_read", "Prefills that were read by their decode workers.")
        self._unread = self._counter("offers_failed", "Prefills that were not read, by cause.", "cause")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the counts of one engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for seconds, moved, blocks, lane, phases in transfer_stats_data.get("pulls", ()):
            self._seconds.labels(*labels).observe(seconds)
            self._bytes.labels(*labels).observe(moved)
            self._blocks.labels(*labels).observe(blocks)
            self._pulls.labels(*labels, lane or "none").inc()
            for phase, phase_seconds in phases.items():
                self._phases.labels(*labels, phase).observe(phase_seconds)
        for cause, count in transfer_stats_data.get("failed", {}).items():
            self._failed.labels(*labels, cause).inc(count)
        self._read.labels(*labels).inc(transfer_stats_data.get("offers_read", 0))
        for cause, count in transfer_stats_data.get("offers_failed", {}).items():
            self._unread.labels(*labels, cause).inc(count)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...], *more: str) -> Any:
        return self._histogram_cls(
            name=f"vllm:kvlink_{name}",
            documentation=documentation,
            buckets=list(buckets),
            labelnames=[*self._labelnames, *more],
        )

    def _counter(self, name: str, documentation: str, *more: str) -> Any:
        return self._counter_cls(
            name=f"vllm:kvlink_{name}", documentation=documentation, labelnames=[*self._labelnames, *more]
        )
