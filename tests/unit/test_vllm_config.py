"""``kv_connector_extra_config`` and ``kv_transfer_params``: what is accepted, and what each refusal says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvlink
from kvlink.engines.vllm.config import ConnectorConfig, rank_address
from kvlink.engines.vllm.params import (
    EngineFacts,
    RemotePrefill,
    prefilled,
    wants_prefill_kept,
    wants_remote_prefill,
)
from kvlink.errors import ConfigError, TicketInvalid


def ticket(num_tokens: int = 64) -> dict[str, Any]:
    descriptor = {
        "kvlink": 1,
        "name": "vllm-0",
        "address": "10.0.0.4:7000",
        "epoch": "0" * 31 + "1",
        "groups": [{"name": "group0", "num_blocks": 8, "block_tokens": 32}],
    }
    return kvlink.TicketMint([descriptor]).offer(num_tokens=num_tokens)


def test_settings_that_are_left_out_have_their_defaults() -> None:
    assert ConnectorConfig.of(None) == ConnectorConfig.of({}) == ConnectorConfig()
    limits = ConnectorConfig.of({"window_bytes": 1 << 31, "push_threshold_tokens": 64}).limits()
    assert (limits.node_window_bytes, limits.peer_window_bytes, limits.push_at_once_tokens) == (1 << 31, 1 << 30, 64)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"ttl_s": 0}, r"ttl_s is 0, outside \[0.001, 86400\]"),
        ({"ttl_s": float("nan")}, r"ttl_s is nan, outside"),
        ({"deadline_s": "30"}, r"deadline_s must be a number, not '30'"),
        ({"push_threshold_tokens": 1.5}, "push_threshold_tokens must be a whole number"),
        ({"window_bytes": True}, "window_bytes must be a whole number"),
        ({"peer_window_bytes": 4096}, r"peer_window_bytes is 4096, outside \[65536, "),
        ({"copy_threads": 0}, r"copy_threads is 0, outside \[1, 256\]"),
        ({"push": "yes"}, "push must be true or false, not 'yes'"),
        ({"integrity": "md5"}, "integrity is 'md5'; choose from crc32c, xxh3"),
        ({"layout": "NHD"}, "layout is 'NHD'; choose from LBHNC"),
        ({"lanes": "staged"}, "lanes must be a list"),
        ({"lanes": ["pigeon"]}, "choose from mapped, vectored, get, staged"),
        ({"listen": "10.0.0.4"}, r"listen is '10.0.0.4': .* is not host:port"),
        ({"advertise": "10.0.0.4:99999"}, "port 99999 is outside"),
        ({"secret": ""}, "secret must be text that is not empty"),
        ({"secret": "a", "secret_env": "B"}, "secret and secret_env are both given"),
        ({"kv_lease_duration": 30}, "there is no key 'kv_lease_duration'; the keys are listen, "),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_its_name_and_bounds(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ConnectorConfig.of(extra)


def test_ports_count_on_with_the_ranks() -> None:
    assert [rank_address("0.0.0.0:7000", rank) for rank in (0, 3)] == ["0.0.0.0:7000", "0.0.0.0:7003"]
    assert rank_address("127.0.0.1:0", 3) == "127.0.0.1:0"
    assert rank_address("host-a", 3) == "host-a"
    assert rank_address("[::1]:7000", 1) == "[::1]:7001"
    assert rank_address("fe80::1", 1) == "fe80::1"
    assert rank_address(None, 1) is None


def test_a_secret_comes_from_where_it_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from a file\n")
    assert ConnectorConfig.of({"secret_file": str(file)}).read_secret() == b"from a file"
    assert ConnectorConfig.of({"secret_env": "S"}).read_secret({"S": "from there"}) == b"from there"
    assert ConnectorConfig.of({"secret": "itself"}).read_secret() == b"itself"
    assert ConnectorConfig.of({}).read_secret() is None
    with pytest.raises(ConfigError, match="has no secret"):
        ConnectorConfig.of({"secret_env": "S"}).read_secret({})
    with pytest.raises(ConfigError, match="No such file"):
        ConnectorConfig.of({"secret_file": str(tmp_path / "none")}).read_secret()


def test_parameters_have_the_keys_of_nixl_and_survive_json() -> None:
    engine = EngineFacts(engine_id="e1", tp_size=2, pp_size=3)
    given = prefilled(engine, "r1", ticket=ticket(), blocks=[[5, 4], (3,)], num_tokens=40)
    params = json.loads(json.dumps(given))
    assert params == given
    for key, value in {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e1",
        "remote_request_id": "r1",
        "remote_block_ids": [[5, 4], [3]],
        "remote_host": "10.0.0.4",
        "remote_port": 7000,
        "tp_size": 2,
        "pp_size": 3,
        "remote_num_tokens": 40,
        "transfer_mode": "pull",
    }.items():
        assert params[key] == value, key
    assert wants_remote_prefill(params)
    assert not wants_prefill_kept(params)
    remote = RemotePrefill.of({**params, "added_by_a_router": 1})
    assert (remote.num_tokens, remote.parsed.num_tokens) == (40, 64)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False, "remote_host": None}])
def test_requests_without_a_handoff_ask_for_none(params: dict[str, Any] | None) -> None:
    assert not wants_prefill_kept(params)
    assert not wants_remote_prefill(params)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kvlink": None}, "has no 'kvlink': was the prefill engine started with KvlinkConnector"),
        ({"kvlink": {"id": 1}}, "not a ticket"),
        ({"kvlink": {**ticket(), "num_tokens": 65}}, "altered"),
        ({"remote_num_tokens": 65}, "for 64 tokens, and remote_num_tokens is 65"),
        ({"remote_num_tokens": -1}, "remote_num_tokens is -1"),
        ({"remote_num_tokens": "40"}, "remote_num_tokens is '40'"),
    ],
)
def test_parameters_that_were_cut_or_altered_are_refused(change: dict[str, Any], said: str) -> None:
    params = prefilled(EngineFacts(engine_id="e"), "r", ticket=ticket(), blocks=[[1]], num_tokens=40)
    with pytest.raises(TicketInvalid, match=said):
        RemotePrefill.of({**params, **change})


def test_only_the_connector_needs_vllm() -> None:
    """And says so, in place of a missing module of somebody else's."""
    program = """
import sys
sys.modules["vllm"] = None
import kvlink.engines.vllm
import kvlink.engines.vllm.config, kvlink.engines.vllm.params, kvlink.engines.vllm.layouts
import kvlink.engines.vllm.scheduler, kvlink.engines.vllm.messages, kvlink.engines.vllm.stats
assert "kvlink._native" not in sys.modules, "the scheduler's process needs no native core"
for use in ("from kvlink.engines.vllm import KvlinkConnector", "kvlink.engines.vllm.register()"):
    try:
        exec(use)
    except ImportError as error:
        assert "install vllm" in str(error), error
    else:
        raise AssertionError(use)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
