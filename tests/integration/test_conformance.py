"""The conformance kit: adapters that are right pass all of it, and each way to be wrong is found."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers.source_text import ROOT

import kvlink
from kvlink.errors import KvlinkError, OutOfMemory
from kvlink.testing.conformance import CASES, Adapter, Kit


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("adapter_example", ROOT / "examples/adapter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for the module
    spec.loader.exec_module(module)
    return module


ToyAdapter: Any = _example().ToyAdapter
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)


@dataclass(eq=False)
class _Request:
    handle: Any
    blocks: tuple[int, ...]
    num_tokens: int
    is_finished: bool = False


class TransformersAdapter:
    """The paged cache for Hugging Face models, as a worker would use it."""

    def __init__(self, name: str, model: Any) -> None:
        from kvlink.engines.transformers import TransformersEngine

        self._engine = TransformersEngine(model, num_blocks=48, block_tokens=4, shuffle_seed=3)
        self._pool = self._engine.pool.allocator
        self.block_tokens = 4
        self.node = kvlink.Node(self._engine.cache, name=name, copy_threads=1)

    def num_free(self) -> int:
        return self._pool.num_free

    def send(self, *, num_tokens: int, seed: int, ttl_s: float) -> Any:
        prompt = np.random.default_rng(seed).integers(0, 256, num_tokens).tolist()
        try:
            prefilled = self._engine.prefill(prompt)
        except OutOfMemory:
            return None
        offer = self.node.offer(prefilled.blocks, num_tokens=num_tokens, ttl_s=ttl_s)
        return _Request(self._pool.give(prefilled.blocks, offer), prefilled.blocks, num_tokens)

    def ticket(self, request: Any) -> dict[str, Any]:
        ticket: dict[str, Any] = request.handle.ticket
        return ticket

    def receive(self, ticket: dict[str, Any], *, deadline_s: float) -> Any:
        try:
            blocks = self._engine.admit(num_tokens=ticket["num_tokens"], max_new_tokens=1)
        except OutOfMemory:
            return None
        try:
            pull = self.node.pull(ticket, blocks, deadline_s=deadline_s)
        except KvlinkError:
            self._engine.release(blocks)
            raise
        return _Request(self._pool.give(blocks, pull), blocks, ticket["num_tokens"])

    def reserve(self, *, num_tokens: int, ttl_s: float) -> Any:
        try:
            blocks = self._engine.admit(num_tokens=num_tokens, max_new_tokens=1)
        except OutOfMemory:
            return None
        slot = self.node.reserve(blocks, num_tokens=num_tokens, ttl_s=ttl_s)
        return _Request(self._pool.give(blocks, slot), blocks, num_tokens)

    def push(self, ticket: dict[str, Any], *, seed: int, deadline_s: float) -> Any:
        num_tokens = ticket["num_tokens"]
        prompt = np.random.default_rng(seed).integers(0, 256, num_tokens).tolist()
        try:
            blocks = self._engine.admit(num_tokens=num_tokens, max_new_tokens=1)
        except OutOfMemory:
            return None
        try:
            push = self.node.push(ticket, blocks, deadline_s=deadline_s)
        except KvlinkError:
            self._engine.release(blocks)
            raise
        request = _Request(self._pool.give(blocks, push), blocks, num_tokens)

        def tell(layer: int, tokens: range) -> None:
            with contextlib.suppress(KvlinkError):  # it has failed meanwhile
                push.ready(layers=[f"layers.{layer}"], tokens=tokens)

        for _ in self._engine.prefill_chunks(prompt, blocks=blocks, chunk_tokens=4, on_layer=tell):
            pass
        with contextlib.suppress(KvlinkError):
            push.commit()
        return request

    def poll(self, request: Any) -> bool:
        done: bool = request.handle.poll()
        return done

    def content(self, request: Any) -> bytes:
        slots = self._engine.pool.slots_of(request.blocks)[: request.num_tokens]
        found: bytes = self._engine.pool.tensor.flatten(2, 3)[:, :, slots].numpy().tobytes()
        return found

    def abort(self, request: Any) -> None:
        request.handle.cancel()
        self.finish(request)

    def finish(self, request: Any) -> None:
        if not request.is_finished:
            request.is_finished = True
            self._engine.release(request.blocks)

    def close(self) -> None:
        self.node.close()


@pytest.fixture(scope="module")
def model() -> Any:
    torch = pytest.importorskip("torch", reason="the demo extra is not installed")
    pytest.importorskip("transformers", reason="the demo extra is not installed")
    from helpers.tiny_llama import make_model

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_model()
    torch.set_num_threads(before)


def test_an_adapter_is_written_in_less_than_150_lines() -> None:
    assert len((ROOT / "examples/adapter.py").read_text().splitlines()) < 150


@by_case
def test_the_transformers_adapter_is_conformant(case: Callable[[Kit], None], model: Any) -> None:
    case(Kit(make=lambda name: TransformersAdapter(name, model)))


class FreesTooSoon(ToyAdapter):  # type: ignore[misc]
    """Takes blocks back while something may still write them."""

    def finish(self, request: Any) -> None:
        if not request.is_finished:
            self.pool._held.update((block, []) for block in request.blocks)
        super().finish(request)


class ForgetsOnAbort(ToyAdapter):  # type: ignore[misc]
    """Leaves the blocks of what is aborted with nobody."""

    def abort(self, request: Any) -> None:
        request.handle.cancel()


class SaysDoneTooSoon(ToyAdapter):  # type: ignore[misc]
    """Takes anything that is over for success."""

    def poll(self, request: Any) -> bool:
        return request.handle.outcome is not None


class Waits(ToyAdapter):  # type: ignore[misc]
    """Stands still until the bytes are here."""

    def receive(self, ticket: dict[str, Any], *, deadline_s: float) -> Any:
        request = super().receive(ticket, deadline_s=deadline_s)
        if request is not None:
            request.handle.wait_released(timeout_s=deadline_s + 1)
        return request


class MixesBlocks(ToyAdapter):  # type: ignore[misc]
    """Reads into its blocks in another order than that of the tokens."""

    def receive(self, ticket: dict[str, Any], *, deadline_s: float) -> Any:
        request = super().receive(ticket, deadline_s=deadline_s)
        if request is not None:
            request.blocks = request.blocks[::-1]
        return request


class SaysReadyTooSoon(ToyAdapter):  # type: ignore[misc]
    """Commits a push before what it is of has been computed."""

    def push(self, ticket: dict[str, Any], *, seed: int, deadline_s: float) -> Any:
        request = self._admit(ticket["num_tokens"])
        self._started(request, lambda: self.node.push(ticket, request.blocks, deadline_s=deadline_s))
        request.handle.commit()
        request.handle.wait_released(timeout_s=deadline_s)
        list(self._prefill(request, seed))
        return request


class LeaksOnRefusal(ToyAdapter):  # type: ignore[misc]
    """Keeps blocks of what kvlink has refused at once."""

    def _started(self, request: Any, start: Callable[[], Any]) -> Any:
        pool, self.pool = self.pool, _Keeping(self.pool)
        try:
            return super()._started(request, start)
        finally:
            self.pool = pool


class _Keeping:
    """A pool that takes nothing back."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def free(self, blocks: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("wrong", "found_by"),
    [
        (FreesTooSoon, "reuse_in_flight"),
        (ForgetsOnAbort, "reuse_in_flight"),
        (SaysDoneTooSoon, "failure_as_success"),
        (Waits, "unbounded_wait"),
        (MixesBlocks, "partial_ranges"),
        (LeaksOnRefusal, "failure_as_success"),
        (FreesTooSoon, "pushed_reuse_in_flight"),
        (SaysDoneTooSoon, "reservations_that_are_over"),
        (SaysReadyTooSoon, "pushed_partial_ranges"),
        (LeaksOnRefusal, "reservations_that_are_over"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_each_way_to_be_wrong_is_found(
    wrong: Callable[[str], Adapter], found_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlink.testing.driving.DEADLINE_S", 1.0)  # to wait for blocks that never come
    (case,) = (case for case in CASES if case.__name__ == found_by)
    with pytest.raises((AssertionError, KvlinkError)):
        case(Kit(make=wrong))
