"""What `pip` makes of the project: the source archive is complete, and a wheel made from it works by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from helpers.source_text import ROOT, files, name

TIMEOUT_S = 240


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
    script = "import kvlink, kvlink._native; kvlink.empty((4,), 'uint8'); print(kvlink._native.__file__)"
    used = run("-c", script, cwd=tmp_path, PYTHONPATH=str(target))
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith(str(target))
    assert sorted(path.name for path in target.iterdir() if path.name != "bin")[0] == "kvlink"


def test_missing_ucx_headers_fail_the_build_with_one_sentence(tmp_path):
    failed = run("setup.py", "-q", "build_ext", "--build-lib", str(tmp_path), cwd=ROOT, KVLINK_UCX_INCLUDE="/nowhere")
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "libucx-cu12==1.14.1.post2" in failed.stderr
