"""The proxy of examples/vllm_pd, between servers that only note what they are asked."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers.source_text import ROOT

TICKET = {"do_remote_prefill": True, "kvlink": {"id": 7}}


class Server(ThreadingHTTPServer):
    """Answers each POST with what `answer` makes of its body: a status, and the body of the response."""

    daemon_threads = True

    def __init__(self, answer: Any) -> None:
        super().__init__(("127.0.0.1", 0), Noting)
        self.answer = answer
        self.asked: list[tuple[str, dict[str, Any]]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Noting(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        status, text = self.server.answer(body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *arguments: Any) -> None: ...  # noqa: A002


@pytest.fixture
def proxy_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example, imported as its neighbour imports it."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/vllm_pd"))
    import proxy

    yield proxy
    del sys.modules["proxy"]


@pytest.fixture
def servers(proxy_module: Any) -> Iterator[tuple[Server, Server, str]]:
    """Prefill, decode, and the address of the proxy between them."""
    prefill = Server(lambda body: (200, json.dumps({"kv_transfer_params": TICKET})))
    decode = Server(lambda body: (200, "data: a\n\ndata: b\n\n") if body.get("stream") else (200, '{"choices": []}'))
    between = proxy_module.ProxyServer(0, prefill.url, decode.url)
    threading.Thread(target=between.serve_forever, daemon=True).start()
    yield prefill, decode, f"http://127.0.0.1:{between.server_port}"
    for server in (prefill, decode, between):
        server.shutdown()
        server.server_close()


def test_prefill_is_asked_for_one_token_and_decode_for_the_rest(proxy_module, servers):
    prefill, decode, url = servers
    body = {"model": "m", "prompt": "p", "max_tokens": 24}
    with proxy_module.post(f"{url}/v1/completions", body) as response:
        assert json.load(response) == {"choices": []}
    ((path, first),) = prefill.asked
    assert path == "/v1/completions"
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.asked == [("/v1/completions", body | {"kv_transfer_params": TICKET})]


def test_a_stream_is_asked_of_decode_only_and_passed_on(proxy_module, servers):
    prefill, _, url = servers
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 9}
    with proxy_module.post(f"{url}/v1/chat/completions", {"messages": []} | options) as response:
        assert response.read() == b"data: a\n\ndata: b\n\n"
    ((_, first),) = prefill.asked
    assert first["max_completion_tokens"] == 1
    assert not {"max_tokens", "stream_options"} & set(first)


def test_what_a_server_refuses_is_passed_on(proxy_module, servers):
    prefill, decode, url = servers
    prefill.answer = lambda body: (400, '{"error": "no such model"}')
    with pytest.raises(urllib.error.HTTPError) as refused:
        proxy_module.post(f"{url}/v1/completions", {"prompt": "p"})
    with refused.value as response:
        assert (response.code, json.load(response)) == (400, {"error": "no such model"})
    assert not decode.asked


def test_a_server_that_is_not_there_is_a_bad_gateway(proxy_module, servers):
    prefill, _, url = servers
    prefill.shutdown()
    prefill.server_close()
    with pytest.raises(urllib.error.HTTPError) as refused:
        proxy_module.post(f"{url}/v1/completions", {"prompt": "p"})
    with refused.value as response:
        assert response.code == 502
