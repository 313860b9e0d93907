"""What the project has agreed on about its own shape. Text and syntax trees only: no build is needed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.source_text import CODE_FOLDERS, ROOT, blanked, cpp_functions, files, name, tree

STAGES = [
    {"errors", "config"},
    {"layout"},
    {"plan"},
    {"transport", "memory"},
    {"handoff", "wire", "commands"},
    {"directory"},
    {"scheduler", "fallback", "fallback_wire", "__init__"},  # `import kvlink` gives the public names, which end here
    {"engines"},
    {"metrics", "sizing", "testing", "demo", "bench", "doctor", "report", "cli"},
]
RANK = {module: rank for rank, modules in enumerate(STAGES) for module in modules}
# What lies right below csrc/kvlink/ stands left of all stages.
NATIVE_STAGES = {"layout": 1, "plan": 2, "transport": 3, "handoff": 4}
PYTHON_ONLY_ERRORS = {"TicketInvalid", "ConfigError", "NoGpu", "UnsupportedMemory"}
BANNED_NAMES = {"util", "utils", "common", "helper", "helpers", "manager", "misc"}

MAX_FILE_LINES = 500
MAX_PYTHON_FUNCTION_LINES = 60
MAX_CPP_FUNCTION_LINES = 70
MAX_BINDING_LINES = 60
MAX_POSITIONAL = 3
MAX_README_LINES = 200


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, first name below kvlink) for each import of the project's own modules."""
    package = ["kvlink", *path.relative_to(ROOT / "kvlink").parts[:-1]]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            dotted = [f"{base}.{alias.name}" for alias in node.names] if base == "kvlink" else [base]
        else:
            continue
        for target in dotted:
            if target.split(".")[0] == "kvlink":
                yield node.lineno, (target.split(".") + ["__init__"])[1]


def test_a_python_stage_imports_only_stages_to_its_left():
    wrong = []
    for path in files("kvlink", suffixes=(".py",)):
        module = path.relative_to(ROOT / "kvlink").with_suffix("").parts[0]
        if module == "__init__":
            continue
        assert module in RANK, f"{name(path)}: give this module a place in STAGES"
        for line, target in imported_modules(path):
            if target in ("_native", module):
                continue
            assert target in RANK, f"{name(path)}:{line} imports kvlink.{target}: import public names from their stage"
            if RANK[target] > RANK[module]:
                wrong.append(f"{name(path)}:{line} imports kvlink.{target}")
    assert not wrong


def test_a_native_stage_includes_only_stages_to_its_left():
    wrong = []
    for path in files("csrc"):
        rank = NATIVE_STAGES.get(path.relative_to(ROOT / "csrc/kvlink").parts[0], 0)
        for target in re.findall(r'#include "([^"]+)"', path.read_text()):
            assert target.startswith("kvlink/"), f'{name(path)} includes "{target}": write it from csrc/'
            if NATIVE_STAGES.get(target.split("/")[1], 0) > rank:
                wrong.append(f'{name(path)} includes "{target}"')
    assert not wrong


def test_no_python_header_is_included_below_csrc():
    wrong = [
        name(path) for path in files("csrc") if re.search(r"#include\s*[<\"](?:Python\.h|nanobind/)", path.read_text())
    ]
    assert not wrong


def test_files_stay_readable_in_one_sitting():
    sizes = {name(path): len(path.read_text().splitlines()) for path in files(*CODE_FOLDERS)}
    sizes["setup.py"] = len((ROOT / "setup.py").read_text().splitlines())
    assert not {path: lines for path, lines in sizes.items() if lines > MAX_FILE_LINES}
    assert sizes["setup.py"] < 80
    assert sizes.get("bindings/module.cpp", 0) <= 40
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_python_functions_stay_short():
    wrong = []
    for path in files(*CODE_FOLDERS, suffixes=(".py",)):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_PYTHON_FUNCTION_LINES:
                    wrong.append(f"{name(path)}:{node.lineno} {node.name} has {lines} lines")
    assert not wrong


def test_cpp_functions_stay_short():
    wrong = []
    for path in files("csrc", "bindings", "tests", suffixes=(".cpp", ".hpp")):
        limit = MAX_BINDING_LINES if path.parts[-2] == "bindings" else MAX_CPP_FUNCTION_LINES
        for function in cpp_functions(path.read_text()):
            if function.line_count > limit:
                wrong.append(f"{name(path)}:{function.first_line} has {function.line_count} lines")
    assert not wrong


def test_the_finder_of_cpp_functions_finds_them():
    text = """namespace a {
class B {
 public:
  B() : x_{1}, y_(2) { f(); }
  int get() const noexcept override {
    if (x_) { return 1; }
    return [this] { return y_; }();
  }
};
template <class T>
auto g(T t) -> decltype(t) {
  return t;  // }
}
struct C { int x{}; };
}  // namespace a
"""
    found = [(function.first_line, function.line_count) for function in cpp_functions(text)]
    assert (5, 4) in found
    assert (10, 4) in found
    assert not [line for line, _ in found if line in (1, 2, 14)]


def test_no_file_is_named_for_having_no_subject():
    paths = files("kvlink", "csrc", "bindings", "benchmarks")
    assert not [name(path) for path in paths if {path.stem, path.parent.name} & BANNED_NAMES]


def test_public_functions_take_few_positional_parameters():
    wrong = []
    for path in files("kvlink", suffixes=(".py",)):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                positional = [arg.arg for arg in node.args.posonlyargs + node.args.args]
                count = len(positional) - (positional[:1] in (["self"], ["cls"]))
                if count > MAX_POSITIONAL:
                    wrong.append(f"{name(path)}:{node.lineno} {node.name} takes {count}")
    assert not wrong


def python_symbols(path: Path) -> set[str]:
    """Names defined at the top of a file, and in its classes as Class.name."""
    found: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
    return found


def test_every_anchor_of_the_architecture_page_exists():
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    anchors = re.findall(r"`([\w./-]+\.(?:py|cpp|hpp)):([\w.:~]+)`", text)
    assert len(anchors) >= 7, "the life of one block has at least seven stops"
    missing = []
    for file, symbol in anchors:
        path = ROOT / file
        if not path.is_file():
            missing.append(f"{file} does not exist")
        elif path.suffix == ".py":
            missing += [] if symbol in python_symbols(path) else [f"{file} has no {symbol}"]
        elif not all(re.search(rf"\b{re.escape(part)}\b", blanked(path.read_text())) for part in symbol.split("::")):
            missing.append(f"{file} has no {symbol}")
    assert not missing


def test_paths_that_the_documents_name_exist():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *files("docs", "csrc", "benchmarks", suffixes=(".md",))]
    missing = []
    for document in documents:
        for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text()):
            if not (document.parent / target).exists():
                missing.append(f"{name(document)} links to {target}")
    assert not missing


def error_codes() -> set[str]:
    body = re.search(r"enum class Code[^{]*\{(.*?)\};", (ROOT / "csrc/kvlink/error.hpp").read_text(), re.DOTALL)
    assert body is not None
    codes = re.findall(r"^\s*(\w+)\s*=\s*\d+", body[1], re.MULTILINE)
    return {"".join(word.capitalize() for word in code.split("_")) for code in codes}


def error_classes() -> set[str]:
    classes = [node for node in tree(ROOT / "kvlink/errors.py").body if isinstance(node, ast.ClassDef)]
    data = {node.name for node in classes if any(ast.unparse(base) == "NamedTuple" for base in node.bases)}
    return {node.name for node in classes} - data - {"KvlinkError"}


def test_every_native_code_has_its_exception_and_every_exception_its_code():
    assert error_classes() - PYTHON_ONLY_ERRORS == error_codes()
    translation = "".join(path.read_text() for path in files("bindings", suffixes=(".cpp",)))
    assert not [code for code in error_codes() if f'"{code}"' not in translation]


def test_every_exception_is_provoked_by_a_test():
    text = "".join(path.read_text() for path in files("tests") if path.name != Path(__file__).name)
    assert not [error for error in sorted(error_classes()) if not re.search(rf"\b{error}\b", text)]


def test_the_gil_is_given_up_only_in_the_way_that_survives_the_end_of_the_interpreter():
    """nanobind's own guard aborts the process where a daemon thread comes back during finalization."""
    users = {path.name for path in (ROOT / "bindings").iterdir() if "PyEval_SaveThread" in path.read_text()}
    assert users == {"gil.hpp"}
    for path in (ROOT / "bindings").iterdir():
        assert "gil_scoped_release" not in path.read_text(), path


def test_functions_that_ucx_calls_cannot_throw():
    text = "\n".join(blanked(path.read_text()) for path in files("csrc"))
    given = re.findall(r"\bcb(?:\.\w+)?\s*=\s*&?((?:\w+::)*\w+)", text)
    assert given, "no callback was found: has the way that they are given to UCX changed?"
    wrong = []
    for callback in {full.split("::")[-1] for full in given} - {"nullptr"}:
        if not re.search(rf"\b{callback}\s*\([^;{{]*\)\s*noexcept", text):
            wrong.append(callback)
    assert not wrong


@pytest.mark.parametrize("folder", ["kvlink", "tests", "benchmarks", "examples"])
def test_nothing_waits_without_a_bound(folder):
    """A thread, process or event is waited for with a time limit. A method of the file's own has its own."""
    wrong = []
    for path in files(folder, suffixes=(".py",)):
        nodes = list(ast.walk(tree(path)))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                method = node.func.attr
                waits = method in ("wait", "join", "communicate") and method not in own
                if waits and not node.args and not node.keywords:
                    wrong.append(f"{name(path)}:{node.lineno} .{method}()")
    assert not wrong


def test_skipped_tests_say_why():
    wrong = []
    for path in files("tests", "benchmarks", suffixes=(".py",)):
        for line, text in enumerate(path.read_text().splitlines(), 1):
            if path != Path(__file__) and re.search(r"mark\.(?:skip|skipif|xfail)\b", text) and "reason" not in text:
                wrong.append(f"{name(path)}:{line}")
    assert not wrong
