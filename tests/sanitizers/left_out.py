"""A plugin of pytest for sanitized runs: leaves out what makes no sense there, and checks that kvlink is sanitized."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

#: By the beginning of a test's name: why it is left out.
LEFT_OUT = {
    "tests/test_architecture.py": "reads text",
    "tests/typing/": "reads text",
    "tests/model/": "runs a model of the table of transitions, not the table's code",
    "tests/packaging/": "builds and installs a wheel of its own, which is not sanitized",
    "tests/cpp/": "is run apart, as programs of their own",
    "benchmarks/": "measures time",
    "tests/environment/test_shared_memory.py::test_the_limit_on_locked": "locks memory, which ASan makes do nothing",
    "tests/lifetime/test_idle_and_start.py": "measures processor time and time",
    "tests/property/test_abort_and_reuse.py::test_blocks_that_are_let_go": "has to overtake what moves",
    "tests/property/test_push_abort_and_reuse.py::test_blocks_that_are_let_go": "has to overtake what moves",
    "tests/lifetime/test_growth.py::test_connecting": "measures resident memory, of which ASan keeps what was freed",
    "tests/lifetime/test_growth.py::test_registering": "measures resident memory, of which ASan keeps what was freed",
}
_left: dict[str, int] = {}


def pytest_configure(config: pytest.Config) -> None:
    """Fail at once where a run would prove nothing."""
    from kvlink import _native

    assert "build/sanitize/tree" in Path(_native.__file__).as_posix(), f"{_native.__file__} is not sanitized"
    assert "libasan" in os.environ.get("LD_PRELOAD", "")
    assert b"__asan_init" in Path(_native.__file__).read_bytes()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out those of the list, and those that are marked as measuring time."""
    kept, left = [], []
    for item in items:
        why = next((why for start, why in LEFT_OUT.items() if item.nodeid.startswith(start)), "")
        if not why and item.get_closest_marker("alone"):
            why = "measures time"
        (left if why else kept).append(item)
        if why:
            _left[why] = _left.get(why, 0) + 1
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out."""
    for why, count in sorted(_left.items()):
        terminalreporter.write_line(f"left out under sanitizers: {count} tests, since such a test {why}")
