"""The public names have the types that users write against, and mistakes are caught."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def mypy(*paths: Path, cache: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=HERE.parents[1]).stdout


def test_the_examples_have_the_types_they_say_and_wrong_uses_are_errors(tmp_path: Path) -> None:
    """In one run of mypy, most of which goes into what both import, and which `make lint` may have done already."""
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
    said = mypy(HERE / "examples.py", file, cache=HERE.parents[1] / ".mypy_cache")
    errors = [line for line in said.splitlines() if ": error:" in line]
    assert {int(line.split(":")[1]) for line in errors if "wrong.py" in line} == set(range(4, 4 + len(wrong))), said
    assert all("wrong.py" in line for line in errors), said
    assert "checked 2 source files" in said, said
