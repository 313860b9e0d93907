"""`kvlink.testing.Worker`: it obeys, it is killed, and it is always reaped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from helpers.refusing import LOST

from kvlink import errors
from kvlink.testing import Worker, WorkerFailed


@pytest.fixture
def worker():
    with Worker("collections:deque", arguments={}) as started:
        yield started


def test_calls_run_in_another_process_one_after_the_other(worker):
    worker.start("append", 1)
    worker.start("append", 2)
    worker.start("pop")
    assert [worker.result() for _ in range(3)] == [None, None, 2]
    assert worker.pid != os.getpid()


def test_an_error_of_kvlink_keeps_its_class_and_its_ranges():
    tests = str(Path(__file__).parents[1])
    with (
        Worker("helpers.refusing:Refusing", python_path=[tests]) as refusing,
        pytest.raises(errors.PeerLost, match="gone") as caught,
    ):
        refusing.call("lose_the_peer")
    assert caught.value.failed == (LOST,)
    assert caught.value.failed[0].end_token == 9
    assert caught.value.valid_prefix_tokens == 3


def test_any_other_error_comes_with_its_traceback(worker):
    with pytest.raises(WorkerFailed, match="IndexError"):
        worker.call("pop")


def test_a_call_without_an_answer_is_reported_with_the_stacks(worker):
    worker.pause()
    with pytest.raises(WorkerFailed, match="no result within"):
        worker.call("copy", timeout_s=0.05)
    worker.resume()
    assert worker.result() is not None


def test_a_killed_worker_is_reaped_and_says_so(worker):
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerFailed, match="ended with -9"):
        worker.result()
    worker.kill()
    assert not Path(f"/proc/{worker.pid}").exists()


def test_a_closed_worker_exits_with_0():
    assert Worker("collections:deque").close() == 0


def test_a_worker_that_cannot_start_is_killed():
    with pytest.raises(WorkerFailed, match="ModuleNotFoundError"):
        Worker("no_such_module:Thing")
