"""How UCX is configured for a node, and what becomes of the variables that the user has set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvlink.errors import ConfigError
from kvlink.transport import interface_of, settings_for


def settings(host: str, *, rdma: bool = False, **env: str) -> dict[str, str]:
    return dict(settings_for(listen_host=host, rdma=rdma, env=env).settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.7", "::1"])
def test_a_loopback_node_stays_on_loopback_and_off_tcp(host: str) -> None:
    chosen = settings(host)
    assert chosen["NET_DEVICES"] == "lo"
    assert chosen["TLS"] == "^tcp"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "203.0.113.9"])  # noqa: S104  # nothing is bound
def test_a_node_for_all_interfaces_is_pinned_to_none(host: str) -> None:
    chosen = settings(host)
    assert "NET_DEVICES" not in chosen
    assert "TLS" not in chosen


def test_both_segment_sizes_are_set_and_a_sent_one_can_be_received() -> None:
    chosen = settings("127.0.0.1")
    assert (chosen["TCP_TX_SEG_SIZE"], chosen["TCP_RX_SEG_SIZE"]) == ("256k", "1m")


def test_ucx_connects_without_waiting_for_a_host_that_is_gone() -> None:
    assert settings("203.0.113.9")["TCP_CONN_NB"] == "y"
    settings("203.0.113.9", UCX_TCP_CONN_NB="yes")
    with pytest.raises(ConfigError, match="UCX_TCP_CONN_NB=n"):
        settings("203.0.113.9", UCX_TCP_CONN_NB="n")


@pytest.mark.parametrize(("host", "chosen"), [("2001:db8::1", "inet6,inet"), ("203.0.113.9", None)])
def test_a_node_that_listens_on_ipv6_moves_bytes_by_ipv6(host: str, chosen: str | None) -> None:
    assert settings(host).get("TCP_AF_PRIO") == chosen


@pytest.mark.parametrize(
    ("env", "allowed"),
    [
        ({}, True),
        ({"UCX_TCP_TX_SEG_SIZE": "1024K"}, True),
        ({"UCX_TCP_TX_SEG_SIZE": "1025K"}, False),
        ({"UCX_TCP_TX_SEG_SIZE": "2m"}, False),
        ({"UCX_TCP_TX_SEG_SIZE": "2m", "UCX_TCP_RX_SEG_SIZE": "2mb"}, True),
        ({"UCX_TCP_RX_SEG_SIZE": "8k"}, False),
        ({"UCX_TCP_RX_SEG_SIZE": "262144"}, True),
        ({"UCX_TCP_RX_SEG_SIZE": "auto"}, True),
    ],
)
def test_segments_that_could_not_be_received_are_refused(env: dict[str, str], allowed: bool) -> None:
    if allowed:
        settings("127.0.0.1", **env)
        return
    with pytest.raises(ConfigError, match=r"UCX_TCP_TX_SEG_SIZE=.* exceeds UCX_TCP_RX_SEG_SIZE="):
        settings("127.0.0.1", **env)


@pytest.mark.parametrize(
    ("host", "transports", "one_sided"),
    [
        ("127.0.0.1", "", True),
        ("0.0.0.0", "", False),  # noqa: S104  # nothing is bound
        ("127.0.0.1", "tcp", False),
        ("127.0.0.1", "posix,tcp", False),
        ("127.0.0.1", "all", False),
        ("127.0.0.1", "^posix", False),
        ("127.0.0.1", "^tcp", True),
        ("127.0.0.1", "posix,cma", True),
        ("0.0.0.0", "^tcp,sysv", True),  # noqa: S104  # nothing is bound
    ],
)
def test_memory_is_open_to_peers_only_where_tcp_cannot_reach_it(host: str, transports: str, one_sided: bool) -> None:
    env = {"UCX_TLS": transports} if transports else {}
    assert settings_for(listen_host=host, rdma=False, env=env).one_sided is one_sided


def test_the_user_s_transports_are_not_replaced() -> None:
    assert "TLS" not in settings("127.0.0.1", UCX_TLS="tcp")


def test_rdma_devices_keep_their_registration_cache_and_their_interfaces() -> None:
    assert settings("127.0.0.1")["RCACHE_ENABLE"] == "n"
    chosen = settings("0.0.0.0", rdma=True)  # noqa: S104  # nothing is bound
    assert "RCACHE_ENABLE" not in chosen
    assert "NET_DEVICES" not in chosen


def test_an_address_that_no_interface_has_belongs_to_none() -> None:
    assert interface_of("203.0.113.9") is None
    assert interface_of("2001:db8::1") is None
    assert interface_of("a-name") is None
    assert interface_of("127.0.0.1") == "lo"


PROBE = """
import json, sys
from kvlink import _native
from kvlink.transport import open_ucx
context = open_ucx(listen_host=sys.argv[1])
print(json.dumps({
    "one_sided": context.one_sided,
    "overruled": context.overruled,
    "same_host": context.transports_to(context, same_host=True),
    "log": _native.ucx_log(),
}))
"""


def probe(host: str, **env: str) -> str:
    environment = {**os.environ, **env}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, host], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_ucx_takes_the_settings_without_a_word() -> None:
    out = probe("127.0.0.1")
    assert '"one_sided": true' in out
    assert "cma/memory" in out
    assert '"log": []' in out


def test_a_user_s_transports_win_and_close_one_sided_access() -> None:
    out = probe("127.0.0.1", UCX_TLS="tcp", UCX_NET_DEVICES="lo")
    assert '"one_sided": false' in out
    assert '"overruled": ["UCX_NET_DEVICES"]' in out
    assert '"same_host": "tcp/lo"' in out


def test_a_transport_that_does_not_exist_is_a_typed_error() -> None:
    code = "from kvlink.transport import open_ucx; open_ucx(listen_host='127.0.0.1')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "UCX_TLS": "pigeon"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "kvlink.errors.UcxUnavailable: start UCX" in done.stderr
