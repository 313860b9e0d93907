"""A hand-off between two vLLM engines by kvlink, by vLLM's own connector of NIXL, and by one that moves nothing.

    make bench-vllm                                # installs NIXL beside vLLM first
    PYTHONPATH=tests python -m benchmarks.vllm_pd --json - --connectors kvlink,null

Time runs from when the step returned that ended the prefill until the step returned that made decode's first token. All
systems hand over the same prompts, in turn, each time in another order. What the engine takes for itself is in the row
`null`; `above_null_ms` is what is left without it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from helpers import vllm_models
from helpers.vllm_engine import Start
from helpers.vllm_fleet import START_TIMEOUT_S, RemoteEngine, forking, kvlink_connector, prefill, prompt, settled

from kvlink.report import write_report

LENGTHS = (128, 512, 2000)
SYSTEMS = ("null", "kvlink", "nixl")
#: Of random weights, as in the tests; 128 KiB of KV a block of 32 tokens.
OPTIONS = {"max_model_len": 2560, "kv_cache_memory_bytes": 128 << 20, "max_num_batched_tokens": 4096}
NIXL = {"UCX_TLS": "tcp,shm,self", "UCX_NET_DEVICES": "lo", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
FIRST_NIXL_PORT = 5710


def connector(system, role):
    """Return vLLM's configuration of one of the systems."""
    if system == "kvlink":
        return kvlink_connector(role, policy="fail")
    if system == "nixl":
        return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
    return {"kv_connector": "NullConnector", "kv_connector_module_path": "helpers.null_connector", "kv_role": role}


class Pair:
    """A prefill and a decode engine with one of the connectors."""

    def __init__(self, system, model, folder, serial):
        self.system = system
        self.serial = serial
        self.engines = []
        for number, role in enumerate(("kv_producer", "kv_consumer")):
            name = f"{system}-{serial}-{role}"
            port = str(FIRST_NIXL_PORT + 2 * serial + number)
            environment = {**NIXL, "VLLM_NIXL_SIDE_CHANNEL_PORT": port} if system == "nixl" else {}
            start = Start(
                name=name,
                model=model,
                log=str(folder / f"{name}.log"),
                connector=connector(system, role),
                options=OPTIONS,
                environment=environment,
            )
            self.engines.append(RemoteEngine(start))

    def wait_ready(self):
        """Wait until both engines serve, and have computed a prompt of each length once."""
        for engine in self.engines:
            engine.wait_ready()
            for tokens in LENGTHS:
                engine.ask(prompt(tokens, 1_000), 2).answer()
        self.free = [engine.state().free_blocks for engine in self.engines]

    def cpu_s(self):
        """Return what both have spent since they started."""
        return sum(engine.state().cpu_s for engine in self.engines)

    def hand_off(self, tokens, number):
        """Hand one prompt over, and return the time in ms, and the CPU time in ms of both, from prefill to release."""
        source, target = self.engines
        offered = prefill(source, prompt(tokens, number))
        before = self.cpu_s()
        answer = target.ask(prompt(tokens, number), 1, offered.kv).answer()
        assert answer.finish == "length", answer
        assert answer.first_step_tokens <= 3, answer
        for engine, blocks in zip(self.engines, self.free, strict=True):
            settled(engine, free_blocks=blocks)
        return 1000 * (answer.first_token_s - offered.seen_s), 1000 * (self.cpu_s() - before)

    def stop(self):
        """End both."""
        for engine in self.engines:
            engine.ask_to_stop()
        for engine in self.engines:
            engine.stop()


@contextmanager
def paused(pairs):
    """Let the engines of other systems sleep: threads of theirs that poll disturb nobody."""
    processes = [engine.pid for pair in pairs for engine in pair.engines]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


def measure(pairs, order, rounds):
    """Return {(system, tokens): [(ms, cpu ms)]} over rounds in which every system hands each prompt over once."""
    found = {}
    for number in range(rounds):
        for tokens in LENGTHS:
            order.shuffle(pairs)
            for pair in pairs:
                with paused([other for other in pairs if other is not pair]):
                    # Whoever slept through its peer's heartbeats has found it again by then.
                    pair.hand_off(LENGTHS[0], number_of(pair.serial, 2 * number))
                    taken = pair.hand_off(tokens, number_of(pair.serial, 2 * number + 1))
                found.setdefault((pair.system, tokens), []).append(taken)
    return found


def number_of(serial, number):
    """Return the number of a prompt that nobody else has."""
    return 10_000 * (serial + 1) + number


def rows_of(kind, found, lengths):
    """Return a row for each system and length."""
    rows = []
    for tokens in lengths:
        null_ms = statistics.median(ms for ms, _ in found[("null", tokens)]) if ("null", tokens) in found else None
        for system in SYSTEMS:
            if (system, tokens) not in found:
                continue
            times, cpu = zip(*found[(system, tokens)], strict=True)
            median = statistics.median(times)
            row = {"contact": kind, "tokens": tokens, "system": system, "samples": len(times)}
            row |= {"ms_median": median, "ms_min": min(times), "ms_max": max(times)}
            row |= {"above_null_ms": None if null_ms is None else median - null_ms}
            rows.append(row | {"cpu_ms_median": statistics.median(cpu)})
    return rows


def first_contacts(systems, model, folder, count, order):
    """Return hand-offs of the shortest prompt between engines that have never met, and the last of those engines."""
    found, kept = {}, []
    for serial in range(count):
        chosen = list(systems)
        order.shuffle(chosen)
        pairs = [Pair(system, model, folder, serial) for system in chosen]
        for pair in pairs:
            pair.wait_ready()
        for pair in pairs:
            with paused([other for other in pairs if other is not pair]):
                taken = pair.hand_off(LENGTHS[0], number_of(pair.serial, 9_999))
            found.setdefault((pair.system, LENGTHS[0]), []).append(taken)
        if serial == count - 1:
            kept = pairs
        else:
            for pair in pairs:
                pair.stop()
    return found, kept


def bench(options, folder):
    """Start the engines, measure, stop them, and return the rows."""
    order = random.Random(options.seed)
    path = folder / "llama"
    saving = forking().Process(target=vllm_models.save, args=("llama", path))
    saving.start()
    saving.join(START_TIMEOUT_S)
    with ExitStack() as ending:
        found, pairs = first_contacts(options.connectors, str(path), folder, options.first_contacts, order)
        for pair in pairs:
            ending.callback(pair.stop)
        steady = measure(pairs, order, options.rounds)
    return rows_of("first", found, LENGTHS[:1]) + rows_of("steady", steady, LENGTHS)


def main():
    """Read the options, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connectors", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=15, help="hand-offs of each length and system, in steady state")
    parser.add_argument("--first-contacts", type=int, default=5, help="pairs of engines that meet for the first time")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--json", help="write the report there; - for standard output")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as folder:
        rows = bench(options, Path(folder))
    table(rows)
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        write_report(options.json, rows)


def table(rows):
    """Print the rows as a table of Markdown."""
    out = sys.stderr
    print("| contact | tokens | by | ms (median, min-max) | above null | CPU ms |\n|---|---|---|---|---|---|", file=out)
    for row in rows:
        above = "" if row["above_null_ms"] is None else f"{row['above_null_ms']:.1f}"
        times = f"{row['ms_median']:.1f} ({row['ms_min']:.1f}-{row['ms_max']:.1f})"
        cells = (row["contact"], row["tokens"], row["system"], times, above, f"{row['cpu_ms_median']:.1f}")
        print(f"| {' | '.join(map(str, cells))} |", file=out)


if __name__ == "__main__":
    main()
