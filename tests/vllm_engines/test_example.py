"""examples/vllm_pd as a person runs it: two servers of the OpenAI API, a proxy, one request, real text."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers.source_text import ROOT

#: Two servers import vLLM and load a model, each on a core; a first run converts the model.
LIMIT_S = 230


@pytest.mark.slow
def test_the_example_answers_the_same_text_and_ends_its_servers():
    done = subprocess.run(
        [sys.executable, "examples/vllm_pd/run.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same text" in done.stdout.splitlines(), done.stdout
    assert "exit codes [0, 0]" in done.stdout
    moved = re.search(r"prompt tokens whose KV kvlink moved: (\d+)", done.stdout)
    assert moved
    assert 50 < int(moved[1]) < 500
