"""Whole requests without the compiled part: the Python transport over a stand-in for `ucxx`."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import fake_ucxx
from helpers.patterns import Geometry, Placement, Request, Side, carve, first_difference, hand_over
from helpers.source_text import ROOT

import kvlink
from kvlink import errors
from kvlink.fallback import PythonNode
from kvlink.handoff.ticket import TicketSource, make_ticket, parse_ticket
from kvlink.transport import python_two_sided

REQUEST = Request(source_blocks=(6, 1, 4), target_blocks=(0, -1, 3), num_tokens=11, skip_tokens=1)
#: Six tokens of two layers, K and V, two heads of eight elements of four bytes.
MOVED_BYTES = 6 * 2 * 2 * 2 * 8 * 4
GEOMETRY = Geometry()
PLACEMENT = Placement(memory="numpy")


def cache_of(side: Side, **more: Any) -> kvlink.KVCache:
    return kvlink.KVCache.from_tensors(
        carve(side.flat, side.geometry, side.placement),
        axes=side.placement.axes_text,
        block_tokens=side.placement.block_tokens,
        **more,
    )


class Two:
    """A source and a target in this process, and what is expected of the target."""

    def __init__(self) -> None:
        self.source_side = Side.random(GEOMETRY, PLACEMENT, seed=1)
        self.target_side = Side.random(GEOMETRY, PLACEMENT, seed=2)
        self.expected = Side.random(GEOMETRY, PLACEMENT, seed=2)

    async def open(self, *, secrets: tuple[str, str] = ("s", "s")) -> None:
        options = {"advertise": "127.0.0.1", "ucx": fake_ucxx}
        self.source = await PythonNode.open(cache_of(self.source_side), name="source", secret=secrets[0], **options)
        self.target = await PythonNode.open(cache_of(self.target_side), name="target", secret=secrets[1], **options)

    async def close(self) -> None:
        await self.source.close()
        await self.target.close()

    def offer(self, **options: Any) -> Any:
        return self.source.offer(list(REQUEST.source_blocks), num_tokens=REQUEST.num_tokens, **options)

    async def pull(self, ticket: Any, **options: Any) -> Any:
        blocks = list(REQUEST.target_blocks)
        return await self.target.pull(ticket, blocks, skip_tokens=REQUEST.skip_tokens, **options)

    def verify(self) -> None:
        wrong = first_difference(self.target_side.flat, self.expected.flat)
        assert not wrong, wrong


def with_two(body: Callable[[Two], Awaitable[None]], **options: Any) -> None:
    """Run `body` with two open nodes; the target's memory is what it should be afterwards."""

    async def main() -> None:
        two = Two()
        await two.open(**options)
        try:
            await body(two)
        finally:
            await two.close()
        two.verify()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_request_moves_with_its_payload_to_each_of_its_readers() -> None:
    async def body(two: Two) -> None:
        offer = two.offer(readers=2, payload=b"first token")
        for _ in range(2):
            pulled = await two.pull(offer.ticket)
            assert pulled.payload == b"first token"
            assert pulled.bytes == MOVED_BYTES
        await offer.wait(timeout_s=10)
        assert offer.released
        hand_over(two.source_side, two.expected, REQUEST)
        two.verify()
        with pytest.raises(errors.AlreadyClaimed):
            await two.pull(offer.ticket)

    with_two(body)


def test_an_offer_whose_time_ran_out_is_read_by_nobody() -> None:
    async def body(two: Two) -> None:
        offer = two.offer(ttl_s=0.001)
        with pytest.raises(errors.TicketExpired):
            await offer.wait(timeout_s=10)
        assert offer.released
        with pytest.raises(errors.TicketExpired):
            await two.pull(offer.ticket)

    with_two(body)


def test_a_source_that_is_gone_is_unreachable() -> None:
    async def body(two: Two) -> None:
        offer = two.offer()
        await two.source.close()
        with pytest.raises(errors.PeerUnreachable):
            await two.pull(offer.ticket)
        with pytest.raises(errors.Closed):
            await offer.wait(timeout_s=10)

    with_two(body)


def test_a_peer_with_another_secret_gets_nothing() -> None:
    async def body(two: Two) -> None:
        with pytest.raises((errors.AuthenticationFailed, errors.PeerLost)):
            await two.pull(two.offer().ticket)

    with_two(body, secrets=("s", "t"))


def test_bytes_altered_on_their_way_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = fake_ucxx.FakeEndpoint.recv

    async def altered(self: fake_ucxx.FakeEndpoint, buffer: Any) -> None:
        await receive(self, buffer)
        if buffer.nbytes == MOVED_BYTES:
            buffer[500] ^= 1

    async def body(two: Two) -> None:
        with pytest.raises(errors.DataCorrupted):
            await two.pull(two.offer().ticket)

    monkeypatch.setattr(fake_ucxx.FakeEndpoint, "recv", altered)
    with_two(body)


def test_a_source_that_does_not_answer_is_over_at_the_deadline() -> None:
    async def body(two: Two) -> None:
        async def silent(endpoint: Any) -> None:
            await asyncio.sleep(30)  # a source that never answers: nobody waits for this

        offer = two.offer()
        listener = fake_ucxx.create_listener(silent)
        parsed = parse_ticket(offer.ticket)
        ticket = make_ticket(
            epoch=parsed.epoch_bytes,
            sequence=parsed.sequence,
            sources=[TicketSource(name="silent", address=f"127.0.0.1:{listener.port}", epoch=parsed.sources[0].epoch)],
            num_tokens=parsed.num_tokens,
            groups=parsed.groups,
            readers=1,
            ttl_ms=1000,
        )
        with pytest.raises(errors.DeadlineExceeded):
            await two.pull(ticket, deadline_s=0.2)
        listener.close()

    with_two(body)


def test_it_needs_a_secret_and_one_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(Side.random(GEOMETRY, PLACEMENT, seed=1))
    with pytest.raises(errors.ConfigError, match="secret"):
        asyncio.run(PythonNode.open(cache, advertise="127.0.0.1", secret="", ucx=fake_ucxx))
    for name in ("ucxx", "ucp"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.UcxUnavailable, match=r"kvlink\[ucxx\]"):
        python_two_sided.load_two_sided()
    monkeypatch.setitem(sys.modules, "ucp", fake_ucxx)
    assert python_two_sided.load_two_sided() is fake_ucxx


_WITHOUT = """
import asyncio, sys
sys.path.append(sys.argv[1])
# Of an editable installation, which would find the compiled part in the tree after all.
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
import numpy as np, kvlink
from helpers import fake_ucxx
from kvlink.fallback import PythonNode
from kvlink.handoff.ticket import TicketSource, make_ticket, parse_ticket
try:
    kvlink.Node
except kvlink.KvlinkError as error:
    print(type(error).__name__, error)
def cache(values):
    return kvlink.KVCache.from_tensors({"layers.0": values}, axes="kv block token head dim", block_tokens=2)
source = np.arange(2 * 4 * 2 * 1 * 3, dtype=np.int32).reshape(2, 4, 2, 1, 3)
target = np.zeros_like(source)
async def main():
    a = await PythonNode.open(cache(source), advertise="127.0.0.1", secret="s", ucx=fake_ucxx)
    b = await PythonNode.open(cache(target), advertise="127.0.0.1", secret="s", ucx=fake_ucxx)
    await b.pull(a.offer([2, 1], num_tokens=4).ticket, [0, 3])
    await a.close(); await b.close()
asyncio.run(main())
assert (target[:, 0] == source[:, 2]).all() and (target[:, 3] == source[:, 1]).all()
print("moved")
"""


def test_it_works_in_an_installation_without_the_compiled_part(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "kvlink", tmp_path / "kvlink", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, str(ROOT / "tests")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "ConfigError kvlink.Node needs the compiled part" in done.stdout
    assert "kvlink.fallback" in done.stdout
    assert done.stdout.endswith("moved\n")
