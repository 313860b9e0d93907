"""Everything that the project shows to a newcomer runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers.source_text import ROOT, files, name

TIMEOUT_S = 60


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


# What needs an engine is in folders, and has tests of its own.
SCRIPTS = [path for path in files("examples", suffixes=(".py",)) if path.parent.name == "examples"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_an_example_runs_and_says_what_it_does(path):
    assert run(str(path)).strip()


def test_the_block_of_the_first_example_arrives():
    assert "block 6 now holds K 1.5 and V 2.5" in run(name(ROOT / "examples/one_block.py"))


def test_the_python_of_the_readme_runs_from_top_to_bottom(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    run(str(script))
