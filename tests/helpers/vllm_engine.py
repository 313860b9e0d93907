"""A vLLM engine in one process, without HTTP: what a forked child runs. It answers over a pipe.

The loop is that of vLLM's own engine process: it sleeps while there is nothing to do, steps while there is, and rests a
millisecond after a step that ran no model. Only so does a test see what a connector does to an engine that is idle.
"""

from __future__ import annotations

import faulthandler
import os
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: What vLLM rests after a step in which no model ran.
REST_S = 0.001
#: For all engines of a machine with few cores. The server that forks them must have them before it imports vLLM.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
#: Threads of torch's groups, one a group: each wakes a hundred times a second, whatever the engine does.
NOT_OURS = frozenset({"gloo_tcp_loop"})
#: What a fork need not import again: most of the seconds that a first engine takes.
PRELOADED = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)


@dataclass(frozen=True, kw_only=True)
class Start:
    """How an engine is started: `connector` is vLLM's kv_transfer_config, `options` what else `LLM` takes."""

    name: str
    model: str
    log: str
    connector: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of a request. Times are of the clock that all processes of a host share.

    `first_step_tokens` is how many tokens the first step that ran the request computed: the whole prompt, or what a
    transfer left of it. `seen_s` is when the step that finished it returned.
    """

    tokens: list[int]
    finish: str | None
    kv: dict[str, Any] | None
    first_step_tokens: int
    first_token_s: float
    seen_s: float


def our_threads_cpu_s() -> float:
    """The CPU seconds of this process's threads that may be ours, as the kernel's scheduler counts them."""
    spent_ns = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            if int(task.name) != os.getpid() and (task / "comm").read_text().strip() not in NOT_OURS:
                spent_ns += int((task / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            continue  # it has ended since
    return spent_ns / 1e9


@dataclass(frozen=True, kw_only=True)
class State:
    """What an engine holds and has spent, at one moment."""

    free_blocks: int
    held_requests: int
    #: vLLM's names of the states of the requests that it holds.
    statuses: tuple[str, ...]
    steps: int
    cpu_s: float
    #: What threads spent that are neither the engine's loop nor torch's (see `NOT_OURS`): ours are among them.
    our_threads_cpu_s: float
    affinity: frozenset[int]
    #: Prompt tokens by where their KV came from, over the life of the engine.
    prompt_tokens: dict[str, int]
    #: How often it took the blocks of a request for another one.
    preemptions: int


class Engine:
    """The engine of this process, and what is asked of it."""

    def __init__(self, start: Start, channel: Connection) -> None:
        from vllm import LLM

        options = {"dtype": "float32", "max_model_len": 1024, "block_size": 32, "max_num_seqs": 8, "seed": 0}
        options |= {"enforce_eager": True, "enable_prefix_caching": False, "skip_tokenizer_init": True}
        options |= {"kv_cache_memory_bytes": 64 << 20, "distributed_executor_backend": "uni"} | start.options
        self.llm = LLM(model=start.model, disable_log_stats=False, kv_transfer_config=start.connector, **options)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.faults: Any = None
        self._channel = channel
        self._steps = 0
        self._ran_model = False
        self._outer: dict[str, str] = {}
        self._first_step: dict[str, int] = {}
        self._first_token: dict[str, float] = {}
        self._watch_schedule()

    def _watch_schedule(self) -> None:
        """Note how many tokens the first step of each request computes: no output of vLLM says so."""
        schedule = self.scheduler.schedule

        def watched(*arguments: Any, **named: Any) -> Any:
            output = schedule(*arguments, **named)
            self._ran_model = output.total_num_scheduled_tokens > 0
            for inner, tokens in output.num_scheduled_tokens.items():
                if tokens:
                    self._first_step.setdefault(inner, tokens)
            return output

        self.scheduler.schedule = watched

    def connector(self) -> Any:
        """The connector's half in the worker, which has the node."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def add(self, outer: str, tokens: list[int], max_tokens: int, kv: dict[str, Any] | None) -> None:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": kv} if kv is not None else None
        wanted = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
        inner = self.llm.llm_engine.add_request(
            outer, {"prompt_token_ids": tokens}, SamplingParams(extra_args=extra, **wanted)
        )
        self._outer[outer] = inner

    def abort(self, outer: str) -> None:
        self.llm.llm_engine.abort_request([outer])

    def state(self) -> State:
        sources = {"external_kv_transfer": 0, "local_compute": 0, "local_cache_hit": 0}
        preemptions = 0
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:prompt_tokens_by_source":
                sources[metric.labels["source"]] = int(metric.value)
            elif metric.name == "vllm:num_preemptions":
                preemptions = int(metric.value)
        return State(
            free_blocks=self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            held_requests=len(self.scheduler.requests),
            statuses=tuple(request.status.name for request in self.scheduler.requests.values()),
            steps=self._steps,
            cpu_s=time.process_time(),
            our_threads_cpu_s=our_threads_cpu_s(),
            affinity=frozenset(os.sched_getaffinity(0)),
            prompt_tokens=sources,
            preemptions=preemptions,
        )

    def run(self) -> None:
        """Serve until asked to stop."""
        while True:
            busy = self.scheduler.has_requests()
            rest = (0.0 if self._ran_model else REST_S) if busy else None
            while self._channel.poll(rest):
                name, *arguments = self._channel.recv()
                if name == "stop":
                    return
                if name == "call":
                    function, number, extra, named = arguments
                    self._channel.send(("returned", number, function(self, *extra, **named)))
                else:
                    getattr(self, name)(*arguments)
                rest = 0.0
            if self.scheduler.has_requests():
                self._step()

    def _step(self) -> None:
        self._ran_model = False
        outputs = self.llm.llm_engine.step()
        now = time.monotonic()
        self._steps += 1
        for output in outputs:
            outer = output.request_id
            if output.outputs[0].token_ids:
                self._first_token.setdefault(outer, now)
            if output.finished:
                self._channel.send(("answer", outer, self._answer(outer, output, now)))

    def _answer(self, outer: str, output: Any, now: float) -> Answer:
        return Answer(
            tokens=list(output.outputs[0].token_ids),
            finish=output.outputs[0].finish_reason,
            kv=output.kv_transfer_params,
            first_step_tokens=self._first_step.pop(self._outer.pop(outer), 0),
            first_token_s=self._first_token.pop(outer, now),
            seen_s=now,
        )

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def serve(start: Start, channel: Connection) -> None:
    """Run the engine of `start` in this process until it is asked to stop. Errors are told, then raised."""
    with open(start.log, "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()
    os.environ.update(ENVIRONMENT | start.environment)
    try:
        engine = Engine(start, channel)
        channel.send(("ready",))
        engine.run()
        engine.close()
    except BaseException:
        channel.send(("died", traceback.format_exc()))
        raise


# What a test may ask of an engine, by `RemoteEngine.call`.


def current_state(engine: Engine) -> State:
    """What `Engine.state` returns."""
    return engine.state()


def script_faults(engine: Engine, **script: Any) -> None:
    """Let what the engine's node pulls from now on go wrong; with no script, let it go right again."""
    from kvlink.testing.faults import FaultScript, inject_faults, remove_faults

    node = engine.connector().worker.node
    if script:
        engine.faults = inject_faults(node, FaultScript(**script))
    else:
        remove_faults(node)


def fault_counts(engine: Engine) -> dict[str, int]:
    """What came of the last script."""
    return engine.faults.read()


def read_blocks(engine: Engine, blocks: list[int]) -> list[Any]:
    """The contents of these blocks, an array a layer."""
    return [layer[list(blocks)].float().numpy().copy() for layer in _layers(engine)]


def find_blocks(engine: Engine, contents: list[Any]) -> list[int | None]:
    """Where each of the blocks that `read_blocks` returned of another engine is here, or None."""
    layers = [layer.float().numpy() for layer in _layers(engine)]
    axes = tuple(range(1, layers[0].ndim))
    found: list[int | None] = []
    for number in range(len(contents[0])):
        same = [(here == there[number]).all(axis=axes) for here, there in zip(layers, contents, strict=True)]
        places = [place for place in range(len(same[0])) if all(one[place] for one in same)]
        found.append(places[0] if places else None)
    return found


def _layers(engine: Engine) -> list[Any]:
    return engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches
