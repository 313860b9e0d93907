"""Builds the fuzz targets of tests/fuzz/native with clang: the native core as a library, then each target."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.native_programs import ROOT, SOURCES, WARNINGS, includes

FOLDER = ROOT / "tests/fuzz/native"
BUILT = ROOT / "build/fuzz"
CLANG = shlex.split(os.environ.get("FUZZ_CXX", "clang++"))
# Objects of different classes with one address are compared by vptr, which would pull every class into every target.
CHECKED = "address,undefined"
FLAGS = ["-std=c++20", "-pthread", "-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize=vptr"]
FLAGS += ["-fno-sanitize-recover=undefined", "-DKVLINK_FUZZ"]


def names() -> list[str]:
    """Return the names of the native targets."""
    return sorted(path.stem for path in FOLDER.glob("*.cpp"))


def _is_current(output: Path) -> bool:
    depends = output.with_suffix(".d")
    if not output.exists() or not depends.exists():
        return False
    needed = depends.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = output.stat().st_mtime
    return all((ROOT / name).exists() and (ROOT / name).stat().st_mtime < made for name in needed)


def _compile(source: Path) -> Path:
    output = BUILT / source.relative_to(ROOT).with_suffix(".o")
    if not _is_current(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.unlink(missing_ok=True)
        sanitizers = [f"-fsanitize=fuzzer-no-link,{CHECKED}", "-fno-sanitize=vptr"]
        command = [*CLANG, *FLAGS, *sanitizers, "-MMD", *WARNINGS, *includes(), "-c", str(source), "-o", str(output)]
        subprocess.run(command, check=True)
    return output


def build(wanted: list[str]) -> dict[str, Path]:
    """Return the program of each target; whatever is not current is compiled first."""
    targets = [FOLDER / f"{name}.cpp" for name in wanted]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The longest first, which are the targets.
        objects = list(pool.map(_compile, [*targets, *SOURCES]))
        library = BUILT / "libkvlink.a"
        library.unlink(missing_ok=True)
        # A library, so that what a target stands in for is not linked as well.
        core = [str(path) for path in objects[len(targets) :]]
        subprocess.run(["ar", "rcs", str(library), *core], check=True)

        def link(item: tuple[str, Path]) -> tuple[str, Path]:
            name, compiled = item
            program = BUILT / name
            sanitizers = [f"-fsanitize=fuzzer,{CHECKED}", "-fno-sanitize=vptr", "-pthread"]
            subprocess.run([*CLANG, *sanitizers, str(compiled), str(library), "-ldl", "-o", str(program)], check=True)
            return name, program

        return dict(pool.map(link, zip(wanted, objects, strict=False)))


if __name__ == "__main__":
    build(sys.argv[1:] or names())
