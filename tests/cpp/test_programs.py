"""Builds each `test_*.cpp` of this folder with the native core, without Python or nanobind, and runs it."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvlink.transport.find_ucx import find_ucx

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(Path(__file__).parent.glob("test_*.cpp"))
STAGES = ("plan", "transport", "handoff")
SOURCES = sorted(path for stage in STAGES for path in (ROOT / "csrc/kvlink" / stage).rglob("*.cpp"))
# With KVLINK_SANITIZE=thread the same programs run under ThreadSanitizer.
SANITIZE = os.environ.get("KVLINK_SANITIZE", "")
SANITIZED = [f"-fsanitize={SANITIZE}", "-g"] if SANITIZE else []
CXX = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++20", "-pthread", *SANITIZED]
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
# Where setup.py keeps what the extension was linked from. A checkout that was installed in another way has none.
OBJECTS = ROOT / "build" / f"native-{SANITIZE.replace(',', '-') or 'release'}"


def includes() -> list[str]:
    """Return where headers are looked for: those of UCX as setup.py finds them."""
    ucx = os.environ.get("KVLINK_UCX_INCLUDE")
    if not ucx:
        spec = importlib.util.find_spec("libucx")
        assert spec is not None
        assert spec.submodule_search_locations
        ucx = str(Path(spec.submodule_search_locations[0]) / "include")
    return [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/cpp'}", "-isystem", ucx]


def build(source: Path, output: Path) -> Path:
    """Compile one source, with the warnings that the extension is built with."""
    subprocess.run([*CXX, "-O1", *WARNINGS, *includes(), "-c", str(source), "-o", str(output)], check=True)
    return output


def object_of(source: Path, folder: Path) -> Path:
    """Return the extension's own object if nothing it was made from has changed since, else a new one in `folder`."""
    built = OBJECTS / source.relative_to(ROOT).with_suffix(".o")
    depends = built.with_suffix(".d")
    if built.exists() and depends.exists():
        needed = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
        made = built.stat().st_mtime
        if all((ROOT / name).exists() and (ROOT / name).stat().st_mtime < made for name in needed):
            return built
    output = folder / f"{source.parent.name}_{source.stem}.o"
    if not output.exists():
        build(source, output.with_suffix(".part")).rename(output)
    return output


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """The object file of every source of the core and of every program."""
    # One folder for all processes of a parallel run: the first one compiles, the others wait and find it done.
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "native-programs"
    folder.mkdir(exist_ok=True)
    sources = [*SOURCES, *PROGRAMS]
    with (folder / "lock").open("a") as lock, ThreadPoolExecutor(os.cpu_count()) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outputs = pool.map(lambda source: object_of(source, folder), sources)
        return {source: str(output) for source, output in zip(sources, outputs, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_native_program_passes(program: Path, objects: dict[Path, str], tmp_path: Path):
    linked = [objects[source] for source in (program, *SOURCES)]
    subprocess.run([*CXX, *linked, "-ldl", "-o", str(tmp_path / "program")], check=True)
    # Those of UCX are told which library to load.
    arguments = [str(find_ucx().path)] if program.stem.startswith("test_ucx") else []
    command = [str(tmp_path / "program"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
