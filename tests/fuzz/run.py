"""Builds and runs the fuzz targets, a table row for each, and fails if one crashed, hung, leaked or grew too large.

``make fuzz`` runs it; ``python -m fuzz.run --help`` says what else it does. What it finds is in build/fuzz/found.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from helpers.native_programs import ROOT

from fuzz import corpus, native_targets, seeds

BUILT = native_targets.BUILT
FOUND = BUILT / "found"
PYTHON = sorted(path.stem for path in (Path(__file__).parent / "python").glob("[a-z]*.py"))

MOST_INPUT_BYTES = 512
ONE_INPUT_S = 60  # by the clock, on a machine that may be busy
MOST_MEMORY_MB = 1024
# What starting, merging a corpus and ending may take beyond the time for inputs.
GRACE_S = 300
# Freed memory that stays poisoned: an input frees less than this, and a larger amount is only slower to come by.
SANITIZERS = {"ASAN_OPTIONS": "quarantine_size_mb=16", "UBSAN_OPTIONS": "print_stacktrace=1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one target fared."""

    name: str
    inputs: int
    seconds: float
    edges: int
    of_edges: int
    memory_mb: int
    found: int
    why: str

    def __str__(self) -> str:
        """Return its line of the table."""
        edges = f"{self.edges} of {self.of_edges}" if self.of_edges else f"{self.edges}"
        rate = self.inputs / max(self.seconds, 1e-3)
        numbers = f"{self.inputs:>12,} | {rate:>9,.0f} | {edges:>14} | {self.memory_mb:>4} MB | {self.found:>5}"
        return f"| {self.name:<18} | {numbers} | {self.why or 'ok'} |"


HEADER = """| target             |       inputs |  inputs/s | branches       | memory  | found |  |
|--------------------|-------------:|----------:|----------------|--------:|------:|--|"""


def _program(name: str, programs: dict[str, Path]) -> str:
    """Return what runs a target; for one in Python a script, since libFuzzer starts what it is by its name to merge."""
    if name in programs:
        return str(programs[name])
    script = BUILT / name
    script.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    start = shlex.join(["env", f"PYTHONPATH={path}", sys.executable, "-m", "fuzz.with_atheris", name, str(script)])
    script.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
    script.chmod(0o755)
    return str(script)


def _run(command: list[str], log: Path, *, limit_s: float) -> int:
    """Run to the end; one that goes on for longer than it should has hung, and counts as failed."""
    environment = {**os.environ, **SANITIZERS}
    with log.open("wb") as out:
        try:
            return subprocess.run(
                command, stdout=out, stderr=out, cwd=ROOT, env=environment, check=False, timeout=limit_s
            ).returncode
        except subprocess.TimeoutExpired:
            return 124


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def _why(status: int, text: str) -> str:
    if status == 0:
        return ""
    said = re.findall(r"(?:SUMMARY|ERROR): (.*)|(does not hold: .*)", text)
    return f"exit {status}: {''.join(said[-1]) if said else 'see its log'}"


def fuzz(name: str, programs: dict[str, Path], *, seconds: int, runs: int, seed: int) -> Row:
    """Fuzz one target until it has had its time, or so many inputs."""
    folder = corpus.unpack(name, BUILT / "corpus" / name)
    FOUND.mkdir(parents=True, exist_ok=True)
    before = set(FOUND.glob(f"{name}-*"))
    log = BUILT / f"{name}.log"
    options = [f"-max_total_time={seconds}", f"-runs={runs}", f"-max_len={MOST_INPUT_BYTES}", f"-timeout={ONE_INPUT_S}"]
    options += [f"-rss_limit_mb={MOST_MEMORY_MB}", f"-artifact_prefix={FOUND}/{name}-", "-print_final_stats=1"]
    options += [f"-seed={seed}"]
    if name in programs:  # weighing inputs by how rare is what they reach takes longer than running them
        options += ["-entropic=0"]
    began = time.monotonic()
    status = _run([_program(name, programs), str(folder), *options], log, limit_s=seconds + GRACE_S)
    text = log.read_text(errors="replace")
    return Row(
        name=name,
        inputs=max(_last(r"number_of_executed_units:\s*(\d+)", text), _last(r"Done (\d+) runs", text)),
        seconds=time.monotonic() - began,
        edges=_last(r"cov: (\d+)", text),
        of_edges=_last(r"\((\d+) inline 8-bit counters", text) if name in programs else 0,
        memory_mb=_last(r"peak_rss_mb:\s*(\d+)", text) or _last(r"rss: (\d+)Mb", text),
        found=len(set(FOUND.glob(f"{name}-*")) - before),
        why=_why(status, text),
    )


def minimise(name: str, programs: dict[str, Path]) -> str:
    """Keep the fewest inputs of all that were found which reach what all of them reach."""
    folder = corpus.unpack(name, BUILT / "corpus" / name)
    smaller = BUILT / "smaller" / name
    smaller.mkdir(parents=True, exist_ok=True)
    for old in smaller.iterdir():
        old.unlink()
    command = [_program(name, programs), "-merge=1", f"-max_len={MOST_INPUT_BYTES}", str(smaller), str(folder)]
    status = _run(command, BUILT / f"{name}.merge.log", limit_s=2 * GRACE_S)
    if status != 0:
        return f"{name}: merging failed with {status}"
    inputs = [path.read_bytes() for path in smaller.iterdir()]
    return f"{name}: {corpus.pack(name, [*inputs, *seeds.of(name)])} inputs kept of {len(list(folder.iterdir()))}"


def main() -> int:
    """Do what the command line says; return the exit status."""
    options = argparse.ArgumentParser(prog="python -m fuzz.run", description=__doc__)
    options.add_argument("targets", nargs="*", metavar="TARGET", help="which; all if none is named")
    options.add_argument("--seconds", type=int, default=600, help="how long each target runs (600)")
    options.add_argument("--runs", type=int, default=-1, help="end a target after so many inputs, too")
    options.add_argument("--at-once", type=int, default=2, help="targets that run at the same time (2)")
    options.add_argument("--seed", type=int, default=0, help="of the choice of inputs; 0 is another one each time")
    options.add_argument("--minimise", action="store_true", help="keep a small corpus of what was found, in the tree")
    options.add_argument("--seeds", action="store_true", help="only begin the kept corpora anew, from real messages")
    given = options.parse_args()
    native = native_targets.names()
    known = [*native, *PYTHON]
    wanted = given.targets or known
    if unknown := set(wanted) - set(known):
        options.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if given.seeds:
        for name in wanted:
            corpus.pack(name, seeds.of(name))
        return 0
    programs = native_targets.build([name for name in native if name in wanted])
    with ThreadPoolExecutor(given.at_once) as pool:
        if given.minimise:
            for line in pool.map(lambda name: minimise(name, programs), wanted):
                print(line, flush=True)
            return 0
        print(HEADER, flush=True)
        rows = []
        for row in pool.map(
            lambda name: fuzz(name, programs, seconds=given.seconds, runs=given.runs, seed=given.seed), wanted
        ):
            print(row, flush=True)
            rows.append(row)
    return 1 if any(row.why or row.found for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
