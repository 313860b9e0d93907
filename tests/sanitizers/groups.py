"""Sources of the extension put together to a few: most of a compiler's time goes into headers that all of them read.

Only sources go together that give no two things one name: what is private to a source, in a namespace without a name,
would clash with its like. Names are read from the first column of the text, where clang-format puts what stands in a
namespace. A compiler that disagrees refuses the group, and then nothing is put together.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

__all__ = ["lay_out"]

#: More than this and one group is still being compiled when all others are done. A line of a binding makes a template.
MOST_LINES = {"csrc": 1500, "bindings": 500}
_NAMED = re.compile(
    r"^(?!(?:namespace|using|return|extern)\b)[A-Za-z_\[][\w:<>,&*\[\]() ]*?\b((?:\w+::)*~?\w+)\s*(?:\(|\{|=|;)",
    re.MULTILINE,
)
#: A source that is included is taken for a header, whose types should not have members of types that only it knows.
_HEAD = '#pragma GCC diagnostic ignored "-Wsubobject-linkage"\n'
_TYPE = re.compile(r"^(?:class|struct|union|enum(?: class)?|using(?= \w+ =))\s+(\w+)", re.MULTILINE)


def names_in(text: str) -> set[str]:
    """What a source names at the outer level."""
    return {*_NAMED.findall(text), *_TYPE.findall(text)}


def grouped(root: Path, sources: Iterable[Path]) -> list[list[Path]]:
    """Put each source into the first group of its folder that has room and none of its names."""
    groups: list[tuple[Path, list[Path], set[str], int]] = []
    for source in sources:
        text = source.read_text()
        names, lines = names_in(text), text.count("\n")
        most = MOST_LINES[source.relative_to(root).parts[0]]
        for index, (folder, members, taken, size) in enumerate(groups):
            if folder == source.parent and size + lines <= most and not names & taken:
                groups[index] = (folder, [*members, source], taken | names, size + lines)
                break
        else:
            groups.append((source.parent, [source], names, lines))
    return [members for _, members, _, _ in groups]


def lay_out(root: Path, folder: Path) -> None:
    """Make `folder` look to setup.py as `root` does, with groups for sources; what has not changed is left as it is."""
    for name in ("csrc", "bindings"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "kvlink", "csrc/kvlink"):
        link(folder / name, root / name)  # setup.py looks for sources, and does not follow links to folders
    for header in (root / "bindings").glob("*.hpp"):
        link(folder / "bindings" / header.name, header)
    sources = sorted(path for name in ("bindings", "csrc") for path in (root / name).rglob("*.cpp"))
    wanted = {}
    for number, members in enumerate(grouped(root, sources)):
        text = _HEAD + "".join(f'#include "{os.path.relpath(source, folder / "bindings")}"\n' for source in members)
        wanted[folder / "bindings" / f"group_{number:02}_{members[0].parent.name}.cpp"] = text
    for path in (folder / "bindings").glob("group_*.cpp"):
        if path not in wanted:
            path.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def link(path: Path, to: Path) -> None:
    """Make a symbolic link, whatever was there."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    path.symlink_to(to)
