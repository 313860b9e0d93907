"""Runs the tests with sanitizers: all of them, or with ``--short`` what CI has minutes for.

The sanitized extension never takes the place of the ordinary one. It is built below build/sanitize, and the Python
suite runs in a copy of the tree there, so that whatever a test starts imports the same. A finding ends the process that
made it; it is also written to a file, since many of those processes are workers whose end nobody asks about, or whose
standard error is a pipe. The run fails if a test does, or if there is such a file.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sanitizers.groups import lay_out

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests/sanitizers"
WORK = ROOT / "build/sanitize"
TREE = WORK / "tree"
REPORTS = WORK / "reports"
#: Without UBSan's look at the type of an object, which goes through a pipe: some tests leave a process no descriptor.
MEMORY, RACES = "address,undefined", "thread"
COPIED = ("kvlink", "tests", "benchmarks", "examples", "docs", "csrc", "bindings", "pyproject.toml", "README.md")
#: Goes through every binding, each lane, conversion, sums, pushes, failures, and the exit of the interpreter.
SHORT = (
    "tests/unit/test_memory_empty.py",
    "tests/unit/test_memory_sharing.py",
    "tests/unit/test_handles.py",
    "tests/unit/test_plan_template.py",
    "tests/unit/test_conversion_kernels.py",
    "tests/unit/test_checksums.py",
    "tests/unit/test_wire.py",
    "tests/integration/test_handoff_on_each_lane.py",
    "tests/integration/test_push_on_each_lane.py",
    "tests/integration/test_integrity.py",
    "tests/errors/test_closed_while_moving.py",
    "tests/errors/test_failed_ranges.py",
    "tests/lifetime/test_interpreter_exit.py",
    "tests/lifetime/test_hasty_close.py",
)
#: Of processes that a sanitizer has ended.
EXIT_CODE = 77
#: Most of one whole part, on a busy machine; a test that hangs ends by itself long before.
PART_S = 4 * 3600


def compiler() -> list[str]:
    """The C++ compiler, as setup.py chooses it."""
    return shlex.split(os.environ.get("CXX", "g++"))


def library(name: str) -> str:
    """Where the compiler has a library of its own."""
    found = subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, timeout=60)
    return str(Path(found.stdout.strip()).resolve())


def build_direct_reads() -> str:
    """Build what stands in front of one function of the sanitizers', and return it."""
    made = WORK / "direct_reads.so"
    source = HERE / "direct_reads.cpp"
    subprocess.run([*compiler(), "-shared", "-fPIC", str(source), "-o", str(made)], check=True, timeout=120)
    return str(made)


def options(**more: object) -> str:
    """Options of a sanitizer's runtime."""
    common = {"log_path": REPORTS / "report", "exitcode": EXIT_CODE, **more}
    return ":".join(f"{name}={value}" for name, value in common.items())


def environment(sanitize: str) -> dict[str, str]:
    """What a sanitized process has in its environment."""
    memory = options(
        detect_leaks=1,
        detect_stack_use_after_return=1,
        allocator_may_return_null=1,  # a request that no machine can fill is an error of ours, and tests ask for it
        quarantine_size_mb=32,  # many processes at a time
        verify_asan_link_order=0,  # of what is preloaded, direct_reads comes first
    )
    return {
        "KVLINK_SANITIZE": sanitize,
        "ASAN_OPTIONS": memory,
        "UBSAN_OPTIONS": options(print_stacktrace=1),
        # LeakSanitizer of GCC 12 now and then dies of looking at what libraries keep in memory of threads.
        "LSAN_OPTIONS": f"suppressions={HERE / 'leaks.supp'}:print_suppressions=0:use_tls=0",
        # UCX is not instrumented: what its functions do to each other cannot be judged.
        "TSAN_OPTIONS": options(suppressions=HERE / "races.supp", halt_on_error=0, ignore_noninstrumented_modules=1),
    }


def run(command: Sequence[str], *, what: str, cwd: Path = ROOT, env: dict[str, str]) -> bool:
    """Run a command and say how long it took; returns whether it succeeded."""
    print(f"sanitize: {what}", flush=True)
    began = time.monotonic()
    code = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, check=False, timeout=PART_S).returncode
    print(
        f"sanitize: {what}: {'ended with ' + str(code) if code else 'passed'}, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return code == 0


def run_programs(sanitize: str) -> bool:
    """Build the C++ test programs, whose sources need no Python, and run them."""
    env = {**environment(sanitize), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    python = [sys.executable, "-m"]
    if not run([*python, "helpers.native_programs", "--core"], what=f"build the C++ programs with {sanitize}", env=env):
        return False
    # ThreadSanitizer's map of memory does not know the widest randomisation of newer kernels.
    fixed = ["setarch", "-R"] if sanitize == RACES and shutil.which("setarch") else []
    tests = ["pytest", "-q", "-p", "no:cacheprovider", "tests/cpp/test_programs.py"]
    preloaded = {"LD_PRELOAD": build_direct_reads()}
    return run([*fixed, *python, *tests], what=f"run the C++ programs with {sanitize}", env=env | preloaded)


def copy_tree() -> None:
    """Put a copy of what tests need beside the sanitized extension."""
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir(parents=True)
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, TREE / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy2(ROOT / name, TREE / name)
    for extension in (WORK / "extension/kvlink").glob("_native.*.so"):
        shutil.copy2(extension, TREE / "kvlink")


def build_extension() -> bool:
    """Build it from groups of sources; from each source by itself, should they not go together."""
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(WORK / "extension")]
    env, what = {"KVLINK_SANITIZE": MEMORY}, f"build the extension with {MEMORY}"
    lay_out(ROOT, WORK / "groups")
    return run(build, what=what, cwd=WORK / "groups", env=env) or run(build, what=f"{what}, one by one", env=env)


def run_suite(selected: Sequence[str], arguments: Sequence[str]) -> bool:
    """Build the extension with ASan and UBSan, and run the Python suite with it."""
    if not build_extension():
        return False
    copy_tree()
    env = {
        **environment(MEMORY),
        "PYTHONPATH": f"{TREE}{os.pathsep}{TREE / 'tests'}",
        # Objects in arenas of Python's own would keep nothing alive in LeakSanitizer's eyes.
        "PYTHONMALLOC": "malloc",
        # Python itself is not instrumented; the C++ library must be there when ASan looks for what throws.
        "LD_PRELOAD": f"{build_direct_reads()} {library('libasan.so')} {library('libstdc++.so.6')}",
    }
    tests = ["pytest", "-q", "-p", "no:cacheprovider", "-p", "sanitizers.left_out", *arguments, *selected]
    return run([sys.executable, "-m", *tests], what=f"run the Python suite with {MEMORY}", cwd=TREE, env=env)


def print_reports() -> int:
    """Print what sanitizers have found in any process; returns how many they are."""
    found = sorted(path for path in REPORTS.iterdir() if path.stat().st_size)
    for path in found:
        print(f"sanitize: {path.name}\n{path.read_text(errors='replace')}")
    return len(found)


def main() -> int:
    """Run it all; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="the C++ programs with TSan, and a part of the suite")
    parser.add_argument("--part", choices=("races", "programs", "suite"), help="only this")
    known, arguments = parser.parse_known_args()
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)
    parts = {
        "races": lambda: run_programs(RACES),
        "suite": lambda: run_suite(SHORT if known.short else (), arguments),
        "programs": lambda: known.short or run_programs(MEMORY),
    }
    passed = [part() for name, part in parts.items() if known.part in (None, name)]
    reports = print_reports()
    good = all(passed) and not reports
    print(f"sanitize: {'passed' if good else 'FAILED'}, {reports} reports in {REPORTS}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
