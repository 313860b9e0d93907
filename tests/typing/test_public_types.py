"""The public names have the types that users write against, and mistakes are caught."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def mypy(path: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=HERE.parents[1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


def test_the_examples_have_the_types_they_say(cache: Path) -> None:
    checked = mypy(HERE / "examples.py", cache)
    assert checked.returncode == 0, checked.stdout


def test_wrong_uses_are_errors(cache: Path, tmp_path: Path) -> None:
    wrong = [
        "kvlink.KVCache.from_tensors({}, 'kv block token head dim', 4)",
        "kvlink.KVCache.from_tensors({}, axes='kv block token head dim', block_tokens='4')",
        "node.offer(blocks=[1], num_tokens='7')",
        "node.pull({}, blocks=[1], deadline=3)",
        "node.pull({}, blocks=[1]).wait(10)",
    ]
    file = tmp_path / "wrong.py"
    file.write_text(
        "import kvlink\n\ndef use(node: kvlink.Node) -> None:\n" + "".join(f"    {line}\n" for line in wrong)
    )
    checked = mypy(file, cache)
    reported = {
        int(line.split(":")[1]) for line in checked.stdout.splitlines() if "wrong.py" in line and ": error:" in line
    }
    assert reported == set(range(4, 4 + len(wrong))), checked.stdout
