"""The smallest proxy between a prefill and a decode server of vLLM: no router of a fleet needs to know more.

Each completion goes to the prefill server first, for one token. What it answers in ``kv_transfer_params`` tells the
decode server where the KV is, and goes there with the same request.

    python examples/vllm_pd/proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# vLLM's own connectors want to see all of these; kvlink needs the first.
ASK_FOR_HAND_OFF = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LONGEST_ANSWER_S = 600


def post(url: str, body: dict[str, Any]) -> Any:
    """Send `body` as JSON and return the response, open."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=LONGEST_ANSWER_S)


def prefill(url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Let the prefill server compute the prompt's KV, and return what the decode server must know of it."""
    wanted = {name: value for name, value in body.items() if name != "stream_options"}
    one_token = {"max_completion_tokens" if "max_completion_tokens" in body else "max_tokens": 1, "stream": False}
    with post(url, wanted | one_token | {"kv_transfer_params": ASK_FOR_HAND_OFF}) as response:
        return json.load(response).get("kv_transfer_params")


class Proxy(BaseHTTPRequestHandler):
    """Handles one connection; the server has the two addresses."""

    def do_POST(self) -> None:  # noqa: N802 (the name is http.server's)
        """Prefill here, decode there, and pass on what comes, as it comes."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            parameters = prefill(self.server.prefill + self.path, body)
            with post(self.server.decode + self.path, body | {"kv_transfer_params": parameters}) as response:
                self.pass_on(response)
        except urllib.error.HTTPError as refused:
            self.pass_on(refused)
        except OSError as error:
            self.send_error(502, explain=str(error))

    def pass_on(self, response: Any) -> None:
        """Copy status, type and body; the end of the connection is the end of the body."""
        self.send_response(response.status)
        self.send_header("Content-Type", response.headers.get("Content-Type", "application/json"))
        self.end_headers()
        while piece := response.read1(1 << 16):
            self.wfile.write(piece)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Say nothing: the servers log."""


class ProxyServer(ThreadingHTTPServer):
    """A thread a connection."""

    daemon_threads = True

    def __init__(self, port: int, prefill_url: str, decode_url: str) -> None:
        super().__init__(("127.0.0.1", port), Proxy)
        self.prefill = prefill_url
        self.decode = decode_url


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, help="URL of the prefill server")
    parser.add_argument("--decode", required=True, help="URL of the decode server")
    options = parser.parse_args()
    ProxyServer(options.port, options.prefill, options.decode).serve_forever()


if __name__ == "__main__":
    main()
