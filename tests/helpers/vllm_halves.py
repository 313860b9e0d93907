"""The connector's part of a vLLM engine, without vLLM: both halves, over tensors of one layout."""

from __future__ import annotations

import json
import pickle
import select
import time
from collections.abc import Sequence
from typing import Any

from helpers.vllm_shapes import CacheConfig, FullAttentionSpec, Group, Request, SlidingWindowSpec, Status, views
from kvlink.engines.vllm.config import ConnectorConfig
from kvlink.engines.vllm.layouts import Content, RankPlace, read_groups
from kvlink.engines.vllm.ledger import Report
from kvlink.engines.vllm.params import EngineFacts
from kvlink.engines.vllm.scheduler import SchedulerFacts, SchedulerHalf
from kvlink.engines.vllm.worker import WorkerHalf

LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]
BLOCKS = 8
TOKENS = 4


class Engine:
    """The connector's part of one engine, with a worker for each rank. A step is told and asked as vLLM does."""

    def __init__(
        self,
        name: str,
        *,
        ranks: int = 1,
        stages: int = 1,
        window: int | None = None,
        whole: bool = False,
        **settings: Any,
    ) -> None:
        spec: Any = FullAttentionSpec(TOKENS)
        if window is not None:
            spec = SlidingWindowSpec(TOKENS, sliding_window=window)
        groups = read_groups(CacheConfig([Group(LAYERS, spec)], BLOCKS))
        config = ConnectorConfig.of({"copy_threads": 1, **settings})
        facts = SchedulerFacts(
            engine=EngineFacts(engine_id=name, tp_size=ranks, pp_size=stages),
            groups=tuple(groups),
            held_back_tokens=0 if window is None else 1,
        )
        import torch

        self.scheduler = SchedulerHalf(facts, config)
        self.workers, self.tensors = [], []
        own = len(LAYERS) // stages
        for number in range(stages * ranks):
            stage, rank = divmod(number, ranks)
            layers = LAYERS[stage * own : (stage + 1) * own]
            tensors = views(torch, "LBHNC", layers=own, blocks=BLOCKS, heads=2 // ranks, tokens=TOKENS, content=6)
            worker = WorkerHalf(config, name=f"{name}-{number}", rank=number, world_size=stages * ranks)
            worker.register(
                dict(zip(layers, tensors, strict=True)),
                groups,
                num_blocks=BLOCKS,
                place=RankPlace(tp_rank=rank, tp_size=ranks, total_kv_heads=2),
                content=lambda layer, tokens: Content(tag="packed" if whole else "int16", whole_blocks=whole),
                model="m",
                one_group=True,
            )
            self.workers.append(worker)
            self.tensors.append(tensors)
        self.scheduler.meet_workers({divmod(number, ranks): one.facts for number, one in enumerate(self.workers)})
        self.told = {number: Report() for number in range(stages * ranks)}

    def step(self, *, layers: Sequence[str] = ()) -> None:
        """One step of vLLM; `layers` are those whose hooks are called while they are computed."""
        orders = pickle.loads(pickle.dumps(self.scheduler.take_orders()))
        for rank, worker in enumerate(self.workers):
            worker.begin(orders)
            for layer in layers:
                worker.layer_done(layer)
            worker.start(orders)
            report, told = worker.poll(), self.told[rank]
            assert not report.sent & told.sent, "a request is told once"
            assert not report.received & told.received, "a request is told once"
            told.sent |= report.sent
            told.received |= report.received
            told.failed |= report.failed
            self.scheduler.received(tuple(report.received))

    def until(self, what: str, request_id: str) -> None:
        """Step until all ranks have told `what` of a request."""
        limit = time.monotonic() + 20
        while not all(request_id in getattr(told, what) for told in self.told.values()):
            assert time.monotonic() < limit, f"{request_id} was never {what}: {self.told}"
            rest(self)
            self.step()

    def prefill(self, request: Request, blocks: list[int], *, value: int = 0, step: bool = True) -> dict[str, Any]:
        """Compute a prompt, and return what the answer says of it."""
        self.scheduler.arrived(request)
        self.fill(blocks, value=value)
        request.num_computed_tokens = request.num_prompt_tokens
        request.status = Status.FINISHED_LENGTH_CAPPED
        kept, params = self.scheduler.finished(request, [blocks])
        assert kept
        if step:
            self.step()
        return json.loads(json.dumps(params))

    def fill(self, blocks: list[int], *, value: int = 0) -> None:
        for tensors in self.tensors:
            for layer, tensor in enumerate(tensors):
                for place, block in enumerate(blocks):
                    tensor[block] = 1000 * value + 100 * layer + place + 1

    def admit(self, request: Request, blocks: list[int], *, computed: int = 0) -> int:
        self.scheduler.arrived(request)
        count, later = self.scheduler.matched(request, computed)
        assert later == (count > 0)
        self.scheduler.allocated(request, (tuple(blocks),), count)
        return count

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def rest(*engines: Engine) -> None:
    """Wait for an event of any node, but not for long: leases of others, and what is announced, ring no bell here."""
    bells = [worker.node.fileno() for engine in engines for worker in engine.workers if not worker.node.closed]
    select.select(bells, [], [], 0.02)


def prompt(length: int = 10) -> list[int]:
    return list(range(length))
