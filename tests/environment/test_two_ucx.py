"""Another UCX that the process has loaded already: it is used, with a warning, or what was asked for is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers.processes import run_python

from kvlink.transport import find_ucx

WHEEL = find_ucx({}).path
MAKE = """
import ctypes, logging, os
import numpy as np
logging.basicConfig(format="%(message)s")
ctypes.CDLL(os.environ["OTHER_UCX"])
import kvlink
tensor = np.zeros((2, 8, 4, 2, 8), "float32")
cache = kvlink.KVCache.from_tensors({"a": tensor}, axes="kv block token head dim", block_tokens=4)
try:
    kvlink.Node(cache, name="a").close()
    print("made")
except kvlink.errors.UcxUnavailable as error:
    print(error)
print(sum("libucp.so" in line and "r-xp" in line for line in open("/proc/self/maps")))
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The same UCX at another place, as a system's would be."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for path in WHEEL.parent.iterdir():
        if not path.name.startswith("libucp.so"):
            (folder / path.name).symlink_to(path)
    shutil.copyfile(WHEEL, folder / "libucp.so.0")
    return folder / "libucp.so.0"


def test_the_one_that_is_loaded_is_used_and_said_so(other: Path) -> None:
    ended = run_python(MAKE, env={"OTHER_UCX": str(other), "KVLINK_UCX": ""})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["made", "1"]
    assert f"using {os.path.realpath(other)}, which this process has already loaded" in ended.stderr


def test_one_that_was_asked_for_by_path_is_refused_beside_it(other: Path) -> None:
    ended = run_python(MAKE, env={"OTHER_UCX": str(other), "KVLINK_UCX": str(WHEEL)})
    assert ended.returncode == 0, ended.stderr
    said, loaded = ended.stdout.splitlines()
    assert "two UCX libraries in one process break each other" in said
    assert loaded == "1"
