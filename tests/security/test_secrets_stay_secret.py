"""A secret is in nothing that is written, shown or sent: logs, errors, reprs, tickets, command lines."""

from __future__ import annotations

import base64
import json
import logging
import traceback
from pathlib import Path

import click
import numpy as np
import pytest
import typer

import kvlink
from kvlink import errors
from kvlink.cli import app

SECRET = "plum-Tarpaulin-9317-oxbow"
OLD = "vixen-Gondola-5521-emery"


def spellings(secret: str) -> list[str]:
    raw = secret.encode()
    return [secret, repr(raw)[2:-1], raw.hex(), base64.b64encode(raw).decode().rstrip("=")]


def new_node(name: str, secret: object) -> kvlink.Node:
    tensor = np.zeros((2, 8, 4, 2, 8), np.float32)
    cache = kvlink.KVCache.from_tensors({"layers.0": tensor}, axes="kv block token head dim", block_tokens=4)
    return kvlink.Node(cache, name=name, secret=secret, copy_threads=1)  # type: ignore[arg-type]


def everything_shown(node: kvlink.Node) -> list[object]:
    running = node._running
    kept = [running, running._settings, running.keyring, running.acceptor, running.answerer, running.life]
    return [node, node.descriptor, node.peers(), node.counters(), node.holds(), node.limits, *kept, running.life.asker]


def test_a_secret_is_in_no_log_error_repr_or_ticket(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[object] = []
    with (
        new_node("source", [OLD, SECRET]) as source,
        new_node("target", SECRET) as target,
        new_node("thief", "x") as thief,
    ):
        offer = source.offer([0, 1], num_tokens=8, readers=2)
        slot = target.reserve([6], num_tokens=4)
        pull = target.pull(offer.ticket, [2, 3]).wait(timeout_s=10)
        push = source.push(slot.ticket, [4])
        push.commit()
        push.wait(timeout_s=10)
        with pytest.raises(errors.AuthenticationFailed) as refused:
            thief.pull(offer.ticket, [4, 5]).wait(timeout_s=10)
        source.rotate_secret(SECRET)
        shown += [offer, pull, slot, push, offer.ticket, slot.ticket, json.dumps(offer.ticket)]
        shown += traceback.format_exception(refused.value)
        for node in (source, target):
            shown += everything_shown(node)
    for wrong in (b"", [SECRET, ""], [SECRET] * 3, {SECRET: OLD}):
        with pytest.raises(errors.ConfigError) as told:
            new_node("refused", wrong)
        shown.append(told.value)
    texts = [repr(one) + str(one) for one in shown] + [record.getMessage() for record in caplog.records]
    assert len(texts) > 20
    for secret in (SECRET, OLD):
        for spelling in spellings(secret):
            assert not [text for text in texts if spelling in text]


def test_no_command_takes_a_secret_where_ps_would_show_it() -> None:
    """The secret comes from a file or from the environment, which only its user and root can read."""

    def commands(command: click.Command, path: str) -> list[tuple[str, click.Command]]:
        found = [(path, command)]
        for name, one in getattr(command, "commands", {}).items():
            found += commands(one, f"{path} {name}")
        return found

    seen = []
    for path, command in commands(typer.main.get_command(app), "kvlink"):
        for option in command.params:
            if "secret" in " ".join(option.opts):
                seen.append(path)
                assert option.opts == ["--secret-file"], path
    assert seen
    assert app.pretty_exceptions_show_locals is False or app.pretty_exceptions_enable is False


def test_workers_are_given_no_secret_on_their_command_lines() -> None:
    """Nodes of this process have one, and the kernel shows the process's command line to everybody."""
    with new_node("source", SECRET):
        assert SECRET.encode() not in Path("/proc/self/cmdline").read_bytes()
    tree = Path(kvlink.__file__).parent
    started = [path for path in tree.rglob("*.py") if "subprocess.Popen(" in path.read_text()]
    assert started
    for path in started:
        for call in path.read_text().split("subprocess.Popen(")[1:]:
            assert "secret" not in call.split("\n    )")[0], path
