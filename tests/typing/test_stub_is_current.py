"""`kvlink/_native.pyi` is what stubgen makes of the extension that is built."""

from __future__ import annotations

import subprocess
import sys

from helpers.source_text import ROOT


def test_the_stub_is_current(tmp_path):
    made = tmp_path / "_native.pyi"
    arguments = ["-q", "-m", "kvlink._native", "-p", str(ROOT / "bindings/stub_patterns.txt"), "-o", str(made)]
    subprocess.run([sys.executable, "-m", "nanobind.stubgen", *arguments], check=True, timeout=60, cwd=ROOT)
    assert (ROOT / "kvlink/_native.pyi").read_text() == made.read_text(), "run `make stub` and commit the result"
