"""Builds the C++ programs of tests/cpp with the native core, without Python or nanobind."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("plan", "transport", "handoff")
SOURCES = sorted(path for stage in STAGES for path in (ROOT / "csrc/kvlink" / stage).rglob("*.cpp"))
# With KVLINK_SANITIZE=thread the same programs run under ThreadSanitizer.
SANITIZE = os.environ.get("KVLINK_SANITIZE", "")
SANITIZED = [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-g1"] if SANITIZE else []
# Optimised, UBSan's checks take a compiler three times as long.
OPTIMISE = "-O0" if "undefined" in SANITIZE else "-O1"
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


def compile_source(source: Path, output: Path) -> Path:
    """Compile one source, with the warnings that the extension is built with."""
    subprocess.run([*CXX, OPTIMISE, "-MMD", *WARNINGS, *includes(), "-c", str(source), "-o", str(output)], check=True)
    return output


def kept_object_of(source: Path) -> Path | None:
    """Return the object of a source that an install left, if nothing that it was made from has changed since."""
    built = OBJECTS / source.relative_to(ROOT).with_suffix(".o")
    depends = built.with_suffix(".d")
    if not built.exists() or not depends.exists():
        return None
    needed = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = built.stat().st_mtime
    return built if all((ROOT / name).exists() and (ROOT / name).stat().st_mtime < made for name in needed) else None


def object_of(source: Path, folder: Path) -> Path:
    """Return the object that an install left if it is current, else a new one in `folder`."""
    return kept_object_of(source) or compile_source(source, folder / f"{source.parent.name}_{source.stem}.o")


def keep_object(source: Path) -> None:
    """Compile a program to where `object_of` looks for it, unless it is there."""
    if kept_object_of(source) is None:
        output = OBJECTS / source.relative_to(ROOT).with_suffix(".o")
        output.parent.mkdir(parents=True, exist_ok=True)
        output.unlink(missing_ok=True)
        compile_source(source, output)


def build_objects(programs: list[Path], folder: Path) -> dict[Path, str]:
    """Return the object file of every source of the core and of every program."""
    sources = [*SOURCES, *programs]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outputs = pool.map(lambda source: object_of(source, folder), sources)
        return {source: str(output) for source, output in zip(sources, outputs, strict=True)}


def link(program: Path, objects: dict[Path, str], output: Path) -> Path:
    """Link a program. What it says to stand in for, ``// Stands in for: handoff/reach.cpp``, is left out."""
    replaced = set(re.findall(r"^// Stands in for: (\S+)$", program.read_text(), re.MULTILINE))
    linked = [
        objects[program],
        *(objects[source] for source in SOURCES if f"{source.parent.name}/{source.name}" not in replaced),
    ]
    subprocess.run([*CXX, *linked, "-ldl", "-o", str(output)], check=True)
    return output


def build_program(program: Path, folder: Path) -> Path:
    """Build one program and return it."""
    return link(program, build_objects([program], folder), folder / program.stem)


if __name__ == "__main__":  # So that a test run need not compile: part of `make install`.
    programs = sorted((ROOT / "tests/cpp").glob("test_*.cpp"))
    core = SOURCES if "--core" in sys.argv else []  # else it is the extension's, which is there
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(keep_object, [*core, *programs]))
