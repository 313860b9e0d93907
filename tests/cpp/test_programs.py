"""Builds each `test_*.cpp` of this folder with the native core, without Python or nanobind, and runs it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers.native_programs import build_objects, link

from kvlink.transport.find_ucx import find_ucx

PROGRAMS = sorted(Path(__file__).parent.glob("test_*.cpp"))
#: Of a program that hangs: seconds are enough, or half a minute of a core with ThreadSanitizer, which a busy machine
#: does not give at once.
PROGRAM_S = 600


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """The object file of every source of the core and of every program."""
    # One folder for all processes of a parallel run: the first one compiles, and the others wait for it.
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "native-programs"
    folder.mkdir(exist_ok=True)
    with (folder / "objects.json").open("a+") as known:
        fcntl.flock(known, fcntl.LOCK_EX)
        known.seek(0)
        if written := known.read():
            return {Path(source): output for source, output in json.loads(written).items()}
        objects = build_objects(PROGRAMS, folder)
        json.dump({str(source): output for source, output in objects.items()}, known)
    return objects


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_native_program_passes(program: Path, objects: dict[Path, str], tmp_path: Path):
    built = link(program, objects, tmp_path / "program")
    # Those of UCX are told which library to load.
    arguments = [str(find_ucx().path)] if program.stem.startswith("test_ucx") else []
    done = subprocess.run([str(built), *arguments], capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
