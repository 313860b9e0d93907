"""What sanitized runs leave out, choose and suppress has its reason; a report of any process fails a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitizers import groups, run
from sanitizers.left_out import LEFT_OUT

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("named", [*LEFT_OUT, *run.SHORT])
def test_what_is_left_out_and_what_is_chosen_is_there(named: str) -> None:
    path, _, function = named.partition("::")
    assert (ROOT / path).exists()
    assert not function or f"def {function}" in (ROOT / path).read_text()


@pytest.mark.parametrize("name", ["leaks.supp", "races.supp"])
def test_each_suppression_has_its_reason(name: str) -> None:
    lines = (ROOT / "tests/sanitizers" / name).read_text().splitlines()
    assert lines[0].startswith("# ")
    assert all(line.startswith(("#", "leak:", "called_from_lib:", "race:")) for line in lines)
    for before, line in zip(lines, lines[1:], strict=False):
        if not line.startswith("#"):
            assert before.startswith(("# ", line.partition(":")[0])), line
        assert "kvlink" not in line or line.startswith("#")


def test_groups_have_each_source_once_and_no_name_twice() -> None:
    sources = sorted(path for name in ("bindings", "csrc") for path in (ROOT / name).rglob("*.cpp"))
    made = groups.grouped(ROOT, sources)
    assert sorted(source for group in made for source in group) == sources
    assert len(made) < len(sources) / 3
    for group in made:
        names = [name for source in group for name in groups.names_in(source.read_text())]
        assert len(names) == len(set(names))


def test_a_group_would_clash_by_what_is_private_to_two_sources(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    texts = {
        "a.cpp": "namespace {\nconstexpr int kSame = 1;\n}  // namespace\n",
        "b.cpp": "namespace {\nint kSame() {\n  return 2;\n}\n}  // namespace\n",
        "c.cpp": "namespace {\nstruct Other {};\n}  // namespace\nvoid Thing::kSame() {\n  kSame();\n}\n",
    }
    for name, text in texts.items():
        (tmp_path / "csrc" / name).write_text(text)
    made = groups.grouped(tmp_path, [tmp_path / "csrc" / name for name in texts])
    assert [[path.name for path in group] for group in made] == [["a.cpp", "c.cpp"], ["b.cpp"]]


@pytest.mark.parametrize("texts", [[], ["leaked"], ["leaked", "raced"]])
def test_reports_are_counted_whoever_has_written_them(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.1").touch()  # opened, and nothing found
    for pid, text in enumerate(texts, start=2):
        (tmp_path / f"report.{pid}").write_text(text)
    monkeypatch.setattr(run, "REPORTS", tmp_path)
    assert run.print_reports() == len(texts)
    said = capsys.readouterr().out
    assert all(text in said for text in texts)
