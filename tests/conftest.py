"""Fixtures and hooks of the whole suite. Never imported from: what tests share lives in `helpers`."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib.util
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import hypothesis
import pytest

TESTS = Path(__file__).parent
# Needs an environment of its own: `make test-vllm`.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["vllm_engines"]
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))  # behind everything else: `tests/typing` must not hide the standard module

from helpers.markers import LANES, Lane, skip_unless_served  # noqa: E402
from helpers.processes import Pair, spawn_node_worker  # noqa: E402
from helpers.soak import rounds  # noqa: E402

from kvlink.testing import Worker  # noqa: E402

#: No test may take longer, whatever it waits for; one with a marker `slow` twice as long. Long forms have half an hour.
TEST_LIMIT_S = rounds(120, 1800)

hypothesis.settings.register_profile("kvlink", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvlink")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the suite's own markers, and let interrupts through: a shell ignores them for what it starts behind."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "expects_warnings: kvlink logs a warning or worse in this test, as it should")
    config.addinivalue_line("markers", "alone: measures time, so no other test of this run goes on meanwhile")


@contextlib.contextmanager
def _locked(path: Path, operation: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, operation)  # let go of at the latest when a process dies
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Let the processes of a parallel run test at the same time, but for tests that want to be alone."""
    run = getattr(item.config, "workerinput", {}).get("testrunuid")
    if run is None:
        return (yield)
    folder = Path(tempfile.gettempdir())
    hall, door = folder / f"kvlink-tests-{run}.hall", folder / f"kvlink-tests-{run}.door"
    alone = item.get_closest_marker("alone") is not None
    with contextlib.ExitStack() as inside:
        # Everybody passes the door one at a time, so that nobody overtakes a test that waits for an empty hall.
        with _locked(door, fcntl.LOCK_EX):
            inside.enter_context(_locked(hall, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what one process should have to itself: a compiler that others can wait for, imports of seconds."""
    first = ["test_programs.py", "test_engine_transformers.py", "test_conformance.py", "test_conversion_kernels.py"]
    first += ["test_vllm_halves.py", "test_vllm_layouts.py", "test_vllm_pushes.py"]
    items.sort(key=lambda item: item.path.name not in first)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the locks of a parallel run once all its processes have ended."""
    if not hasattr(config, "workerinput") and (run := getattr(config.option, "testrunuid", None)):
        for path in Path(tempfile.gettempdir()).glob(f"kvlink-tests-{run}.*"):
            path.unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that hangs, with the stacks of all threads, instead of hanging the suite."""

    def late(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__)
        pytest.fail(f"still running after {limit_s} s")

    limit_s = TEST_LIMIT_S * (2 if item.get_closest_marker("slow") else 1)
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


@pytest.fixture(autouse=True)
def no_unexpected_warnings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which kvlink logged a warning that neither a marker nor `caplog` announces."""
    if request.node.get_closest_marker("expects_warnings") or "caplog" in request.fixturenames:
        yield
        return
    collector = _Collector()
    logger = logging.getLogger("kvlink")
    logger.addHandler(collector)
    try:
        yield
    finally:
        logger.removeHandler(collector)
    assert not collector.lines, collector.lines


@pytest.fixture(params=LANES, ids=lambda lane: lane.id)
def lane(request: pytest.FixtureRequest) -> Lane:
    """Each lane under test."""
    found: Lane = request.param
    skip_unless_served(found)
    return found


class _Crew:
    """Worker processes that live as long as the session, by environment and role."""

    def __init__(self) -> None:
        self._members: dict[tuple[tuple[tuple[str, str], ...], str], Worker] = {}

    def member(self, lane: Lane, role: str) -> Worker:
        key = (tuple(sorted(lane.env.items())), role)
        worker = self._members.get(key)
        if worker is None or not Path(f"/proc/{worker.pid}").exists():
            worker = self._members[key] = spawn_node_worker(lane.env)
        return worker

    def forget(self, worker: Worker) -> None:
        worker.kill()
        self._members = {key: member for key, member in self._members.items() if member is not worker}

    def close(self) -> None:
        for worker in self._members.values():
            code = worker.close()
            assert code == 0, f"a worker ended with {code}:\n{worker.stderr()}"
            assert "leaked" not in worker.stderr(), worker.stderr()


@pytest.fixture(scope="session")
def crew() -> Iterator[_Crew]:
    """Long-lived processes; at the end each must exit with 0 and report no leaked object."""
    found = _Crew()
    yield found
    found.close()


@contextlib.contextmanager
def _lent(crew: _Crew, lane: Lane) -> Iterator[Pair]:
    found = Pair(crew.member(lane, "source"), crew.member(lane, "target"), lane)
    healthy = False
    try:
        yield found
        found.shut()
        healthy = True
    finally:
        if not healthy:  # after a failure the next test starts with fresh processes
            for worker in (found.source, found.target):
                crew.forget(worker)


@pytest.fixture
def pair(lane: Lane, crew: _Crew) -> Iterator[Pair]:
    """Two long-lived processes for the lane under test; nodes are closed after each test."""
    with _lent(crew, lane) as found:
        yield found


@pytest.fixture
def opened(crew: _Crew) -> Iterator[Pair]:
    """The same with nodes over default caches, for what does not depend on the lane."""
    with _lent(crew, LANES[0]) as found:
        found.open()
        yield found


@pytest.fixture
def spawn() -> Iterator[Callable[..., Worker]]:
    """Start worker processes of the test's own; whatever is left of them is killed and reaped."""
    workers: list[Worker] = []

    def start(env: dict[str, str] | None = None) -> Worker:
        workers.append(spawn_node_worker(env))
        return workers[-1]

    yield start
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGCONT)
        worker.kill()


@pytest.fixture
def own_pair(lane: Lane, spawn: Callable[..., Worker]) -> Pair:
    """Two processes of the test's own, for tests that kill or stop one of them."""
    return Pair(spawn(lane.env), spawn(lane.env), lane)
