"""Real vLLM engines for tests and benchmarks: started by fork, asked over pipes, each wait with an end."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from helpers.vllm_engine import ENVIRONMENT, PRELOADED, Answer, Start, State, current_state, serve

#: The first engine waits for the import of vLLM, and others may share the machine.
START_TIMEOUT_S = 240.0
ANSWER_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
#: A few hundred tokens are not worth two requests that happen to be alike.
VOCABULARY = range(3, 250)


class EngineDied(AssertionError):
    """An engine has ended by itself; the message is what it said last."""


def prompt(tokens: int, number: int = 0) -> list[int]:
    """A prompt of so many tokens, another one for each number."""
    return random.Random(f"{tokens}-{number}").choices(VOCABULARY, k=tokens)


def forking() -> ForkServerContext:
    """The server that has imported vLLM and forks engines. Its environment is the engines' own."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    # The server imports before it knows the path of whoever asks.
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*sys.path, *known]))
    return context


class Asked:
    """A request under way at an engine."""

    def __init__(self, engine: RemoteEngine, name: str) -> None:
        self.engine = engine
        self.name = name

    @property
    def done(self) -> bool:
        """Whether it has been answered, as far as messages have been read."""
        return self.name in self.engine.answers

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """Wait for the answer."""
        self.engine.read_until(lambda: self.done, timeout_s, f"answer to {self.name}")
        return self.engine.answers.pop(self.name)

    def abort(self) -> None:
        """Let the client go away. There will be no answer, but the one that may be on its way."""
        self.engine.send("abort", self.name)


class RemoteEngine:
    """An engine in a process of its own."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.answers: dict[str, Answer] = {}
        self._returned: dict[int, Any] = {}
        self._ready = False
        self._stopping = False
        self._numbers = itertools.count()
        context = forking()
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(start, theirs), name=start.name)
        self.process.start()
        theirs.close()

    def __repr__(self) -> str:
        return f"engine {self.start.name} (log: {self.start.log})"

    @property
    def pid(self) -> int:
        """The process."""
        assert self.process.pid is not None
        return self.process.pid

    def wait_ready(self) -> RemoteEngine:
        """Wait until it serves."""
        self.read_until(lambda: self._ready, START_TIMEOUT_S, "readiness")
        return self

    def send(self, *message: Any) -> None:
        """Send one message to the process."""
        self.channel.send(message)

    def read(self) -> None:
        """Take the messages that have come."""
        while self.channel.poll(0):
            try:
                kind, *content = self.channel.recv()
            except EOFError:
                raise EngineDied(f"{self} has ended:\n{self.last_words()}") from None
            if kind == "answer":
                self.answers[content[0]] = content[1]
            elif kind == "returned":
                self._returned[content[0]] = content[1]
            elif kind == "ready":
                self._ready = True
            else:
                raise EngineDied(f"{self} has died:\n{content[0]}\n{self.last_words()}")

    def read_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Take messages until `condition` holds."""
        end = time.monotonic() + timeout_s
        while not condition():
            left = end - time.monotonic()
            came = left > 0 and self.channel.poll(left)
            assert came, f"{self}: no {what} within {timeout_s} s:\n{self.last_words()}"
            self.read()

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(Path(self.start.log).read_text(errors="replace").splitlines()[-15:])

    def ask(self, tokens: list[int], max_tokens: int = 16, kv: dict[str, Any] | None = None) -> Asked:
        """Send a request."""
        name = f"{self.start.name}-{next(self._numbers)}"
        self.send("add", name, tokens, max_tokens, kv)
        return Asked(self, name)

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run a function of a module over there, on the engine, between two steps."""
        number = next(self._numbers)
        self.send("call", function, number, arguments, named)
        self.read_until(lambda: number in self._returned, ANSWER_TIMEOUT_S, f"return of {function.__name__}")
        return self._returned.pop(number)

    def state(self) -> State:
        """What it holds and has spent."""
        return self.call(current_state)

    def ask_to_stop(self) -> None:
        """Tell it to end, without waiting."""
        if not self._stopping and self.process.is_alive():
            self._stopping = True
            with suppress(BrokenPipeError):  # it dies of something: its exit code tells
                self.send("stop")

    def stop(self) -> int | None:
        """Tell it to end, and return its exit code; None if it did not end."""
        self.ask_to_stop()
        self.process.join(STOP_TIMEOUT_S)
        code = self.process.exitcode
        if code is None:
            os.kill(self.pid, signal.SIGABRT)  # leaves the stacks of its threads in the log
            self.process.join(STOP_TIMEOUT_S)
            self.kill()
        self.channel.close()
        return code

    def kill(self) -> None:
        """Let it die without a word."""
        self.process.kill()
        self.process.join(STOP_TIMEOUT_S)


def wait_for(engine: RemoteEngine, status: str, within_s: float = 20.0) -> None:
    """Wait until a request of the engine is in this state of vLLM's."""
    end = time.monotonic() + within_s
    while status not in (state := engine.state()).statuses:
        assert time.monotonic() < end, f"{engine}: no request became {status}: {state}"
        engine.channel.poll(0.005)


def settled(engine: RemoteEngine, *, free_blocks: int, within_s: float = 5.0) -> State:
    """Wait until the engine holds no request, and as many blocks are free as at the start."""
    end = time.monotonic() + within_s
    while True:
        state = engine.state()
        if state.held_requests == 0 and state.free_blocks == free_blocks:
            return state
        assert time.monotonic() < end, f"{engine}: after {within_s} s {state}, at the start {free_blocks} were free"
        engine.channel.poll(0.02)  # an answer, or a little time


def read_any(*engines: RemoteEngine, timeout_s: float) -> None:
    """Wait for a message of any of them and take what has come."""
    for channel in wait_for_any([engine.channel for engine in engines], timeout_s):
        next(engine for engine in engines if engine.channel is channel).read()


def kvlink_connector(role: str = "kv_both", *, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """The part of vLLM's configuration that asks for kvlink's connector."""
    return {
        "kv_connector": "KvlinkConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"listen": "127.0.0.1:0", **extra},
    }


#: What a router asks of the prefill engine.
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill(engine: RemoteEngine, tokens: list[int], timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
    """Let the engine prefill for another one, as a router does; its `kv` is for that one."""
    answer = engine.ask(tokens, 1, dict(PREFILL)).answer(timeout_s)
    assert answer.finish == "length", answer
    assert answer.kv, f"{engine} hands nothing over: {answer}"
    return answer


def hand_off(source: RemoteEngine, target: RemoteEngine, tokens: list[int], max_tokens: int = 16) -> Answer:
    """Prefill at one engine and decode at the other."""
    return target.ask(tokens, max_tokens, prefill(source, tokens).kv).answer()
