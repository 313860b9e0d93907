"""Reads the project's own sources as text and as syntax trees, for the architecture tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("kvlink", "csrc", "bindings", "benchmarks", "tests", "examples")
_LITERAL_OR_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
_NOT_A_FUNCTION = re.compile(r"^\s*(?:if|for|while|switch|catch|do|else|try|namespace|class|struct|enum|union)\b")


def files(*folders: str, suffixes: tuple[str, ...] = (".py", ".cpp", ".hpp")) -> list[Path]:
    """Every source file below `folders`, sorted."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in found if path.suffix in suffixes and "__pycache__" not in path.parts)


def name(path: Path) -> str:
    """The path as a person writes it, from the root of the project."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a Python file. Not to be changed: everybody gets the same."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def blanked(text: str) -> str:
    """C++ text with comments and literals emptied, line numbers unchanged."""
    return _LITERAL_OR_COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


@dataclass(frozen=True)
class CppFunction:
    """One function definition found in C++ text."""

    head: str
    first_line: int
    line_count: int


def cpp_functions(text: str) -> Iterator[CppFunction]:
    """Yield each outermost function definition; lambdas and blocks inside count as part of it."""
    code = blanked(text)
    code = re.sub(r"^[ \t]*#(?:[^\n\\]|\\.)*", lambda match: re.sub(r"[^\n]", " ", match[0]), code, flags=re.M | re.S)
    opened: list[tuple[int, str] | None] = []  # one entry a brace: where a function starts, or None
    head_start = 0
    for match in re.finditer(r"[{};]", code):
        inside = any(opened)
        if match[0] == "{":
            head = code[head_start : match.start()]
            starts = not inside and _is_function_head(head)
            opened.append((head_start + len(head) - len(head.lstrip()), head.strip()) if starts else None)
        elif match[0] == "}" and opened:
            start = opened.pop()
            if start is not None:
                first = code.count("\n", 0, start[0]) + 1
                yield CppFunction(start[1], first, code.count("\n", 0, match.start()) + 2 - first)
        # A brace inside an initialiser list, `: fd_{x}`, must not cut the head off.
        if match[0] != "}" or not re.match(r"\s*[,{]", code[match.end() :]):
            head_start = match.end()


def _is_function_head(head: str) -> bool:
    head = re.sub(r"^\s*(?:public|private|protected)\s*:", "", head.strip())
    head = re.sub(r"^\s*template\s*<[^{}]*?>\s*(?=[\w\[:])", "", head)
    if not head or _NOT_A_FUNCTION.match(head) or "(" not in head:
        return False
    return bool(re.search(r"\)\s*(?:const|noexcept|override|final|mutable|->[^()]*|:.*|\s)*$", head, re.DOTALL))
