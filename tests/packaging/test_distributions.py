"""What `pip` makes of the project: the source archive is complete, and a wheel made from it works by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers import distributions
from helpers.source_text import ROOT, files, name

TIMEOUT_S = 240
#: Something that the loader of this machine takes.
PROGRAM = Path("/bin/true").read_bytes()


def run(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source archive, made from a copy of the tree and unpacked again."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", "*.so", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy / "kvlink", ignore=ignored, symlinks=True)
    made = run(
        "-m", "build", "--sdist", "--no-isolation", "--skip-dependency-check", "--outdir", str(out), cwd=copy / "kvlink"
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (archive,) = out.glob("kvlink-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(out, filter="data")
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


def test_the_source_archive_has_every_source_file(unpacked):
    wanted = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "kvlink/py.typed"}
    wanted |= {name(path) for path in files("kvlink", "csrc", "bindings", "tests")}
    present = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert not wanted - present
    assert not [path for path in present if path.endswith((".so", ".o", ".pyc"))]


def test_a_wheel_from_the_source_archive_works_without_the_tree(unpacked, tmp_path):
    """Objects that `make install` compiled are taken along: their commands and sources are the same."""
    if (ROOT / "build").exists():
        shutil.copytree(ROOT / "build", unpacked / "build", dirs_exist_ok=True)
    made = run(
        "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check", "--outdir", str(tmp_path), cwd=unpacked
    )
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = tmp_path.glob("kvlink-*.whl")
    target = tmp_path / "site"
    pip = ("-m", "pip", "install", "--no-deps", "--no-index", "--target")
    installed = run(*pip, str(target), str(wheel), cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    distributions.check_wheel(wheel)
    script = "import kvlink, kvlink._native; kvlink.empty((4,), 'uint8'); print(kvlink._native.__file__)"
    used = run("-c", script, cwd=tmp_path, PYTHONPATH=str(target))
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith(str(target))
    smoke = shutil.copy(Path(distributions.HERE, "installed_smoke.py"), tmp_path)
    handed_over = run(smoke, cwd=tmp_path, PYTHONPATH=str(target), PATH="/nowhere")
    assert handed_over.returncode == 0, handed_over.stderr
    assert "lanes mapped, staged: right" in handed_over.stdout
    assert sorted(path.name for path in target.iterdir() if path.name != "bin")[0] == "kvlink"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("kvlink.libs/libucp-1.so.0", PROGRAM, "carries kvlink.libs/libucp-1.so.0"),
        ("tests/conftest.py", b"", "has tests/conftest.py"),
        ("kvlink-1.dist-info/METADATA", b"Requires-Dist: numpy>=1\n", "does not require UCX"),
    ],
)
def test_a_wheel_that_carries_or_lacks_something_is_no_wheel_for_a_release(tmp_path, name, content, said):
    wheel = tmp_path / "kvlink-1-cp311-cp311-linux_x86_64.whl"
    files = {
        "kvlink/_native.abi3.so": PROGRAM,
        "kvlink/_native.pyi": b"",
        "kvlink/py.typed": b"",
        "kvlink-1.dist-info/METADATA": b"Name: kvlink\nRequires-Dist: libucx-cu12>=1.14.1\n",
        name: content,
    }
    with zipfile.ZipFile(wheel, "w") as packed:
        for path, data in files.items():
            packed.writestr(path, data)
    with pytest.raises(SystemExit, match=said):
        distributions.check_wheel(wheel)


def test_missing_ucx_headers_fail_the_build_with_one_sentence(tmp_path):
    failed = run("setup.py", "-q", "build_ext", "--build-lib", str(tmp_path), cwd=ROOT, KVLINK_UCX_INCLUDE="/nowhere")
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "libucx-cu12==1.14.1.post2" in failed.stderr
