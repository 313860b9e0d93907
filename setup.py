"""Builds kvlink._native from csrc/, bindings/, nanobind's source and UCX's headers. Nothing of UCX is linked."""

import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = [str(path) for folder in ("bindings", "csrc") for path in sorted(Path(folder).rglob("*.cpp"))]
# A release, which has a PKG-INFO, must build with compilers that know warnings of which we have not heard.
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", *([] if Path("PKG-INFO").exists() else ["-Werror"])]
SANITIZE = os.environ.get("KVLINK_SANITIZE", "")
FAST = ["-O2", "-DNDEBUG"]
OPTIMISE = f"-fsanitize={SANITIZE} -fno-sanitize=vptr -fno-sanitize-recover=all -O0 -g1".split() if SANITIZE else FAST
OBJECTS = Path("build", f"native-{SANITIZE.replace(',', '-') or 'release'}")  # kept, so that a next build can skip
NO_UCX = "kvlink needs UCX's headers: install libucx-cu12==1.14.1.post2, or name their folder in KVLINK_UCX_INCLUDE."
ABI3 = ["-DPy_LIMITED_API=0x030C0000"] if sys.version_info >= (3, 12) and not SANITIZE else []  # as nanobind can


def package_folder(package: str) -> Path | None:
    """Return where `package` is installed, without importing it."""
    return Path(next(iter(spec.submodule_search_locations))) if (spec := importlib.util.find_spec(package)) else None


def ucx_include() -> str:
    """Return the folder of UCX's headers: KVLINK_UCX_INCLUDE, else the one inside the libucx package."""
    folder = os.environ.get("KVLINK_UCX_INCLUDE") or (package_folder("libucx") or Path()) / "include"
    return str(folder) if Path(folder, "ucp/api/ucp.h").is_file() else sys.exit(NO_UCX)


def is_current(output: Path, command: str) -> bool:
    """Return whether `output` was made by this very command, from files that have not changed since."""
    depends, recorded = output.with_suffix(".d"), output.with_suffix(".command")
    if not (output.exists() and depends.exists() and recorded.exists() and recorded.read_text() == command):
        return False
    needed = map(Path, depends.read_text().replace("\\\n", " ").split(":", 1)[1].split())
    # The command is recorded just before the compiler starts, so an edit while it ran counts as newer.
    return all(path.exists() and path.stat().st_mtime < recorded.stat().st_mtime for path in needed)


class BuildNative(build_ext):
    """Compiles in parallel (KVLINK_BUILD_JOBS, else every core), and only what changed."""

    def build_extension(self, ext: Extension) -> None:
        nanobind, cxx = package_folder("nanobind"), shlex.split(os.environ.get("CXX", "g++"))
        system = [ucx_include(), sysconfig.get_path("include"), nanobind / "include"]
        flags = [*ABI3, "-std=c++20", "-fPIC", "-fvisibility=hidden", "-pthread", "-Icsrc", "-Ibindings"]
        flags += [part for folder in system for part in ("-isystem", str(folder))]
        flags += shlex.split(os.environ.get("CXXFLAGS", ""))

        def compile_one(source: str) -> str:
            ours = source in SOURCES
            output = (OBJECTS / (source if ours else "nanobind.cpp")).with_suffix(".o")
            own = WARNINGS if ours else ["-Os", "-w", "-fno-strict-aliasing", f"-I{nanobind}/ext/robin_map/include"]
            command = shlex.join([*cxx, *(OPTIMISE if ours else FAST), *flags, "-MMD", "-c", source, "-o", str(output)])
            if not is_current(output, command):
                output.parent.mkdir(parents=True, exist_ok=True)
                output.unlink(missing_ok=True)
                output.with_suffix(".command").write_text(command)
                if subprocess.run([*shlex.split(command), *own], check=False).returncode:
                    sys.exit(f"kvlink: {source} does not compile, see above.")
            return str(output)

        with ThreadPoolExecutor(int(os.environ.get("KVLINK_BUILD_JOBS") or os.cpu_count() or 1)) as pool:
            objects = list(pool.map(compile_one, [str(nanobind / "src/nb_combined.cpp"), *SOURCES]))
        (target := Path(self.get_ext_fullpath(ext.name))).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([*cxx, *OPTIMISE, "-shared", "-pthread", *objects, "-ldl", "-o", f"{target}.new"], check=True)
        os.replace(f"{target}.new", target)  # a process that runs the old one keeps it


extension = Extension("kvlink._native", SOURCES, py_limited_api=bool(ABI3))
options = {"bdist_wheel": {"py_limited_api": "cp312"} if ABI3 else {}}
setup(ext_modules=[extension], cmdclass={"build_ext": BuildNative}, options=options)
