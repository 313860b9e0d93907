"""Where the demo's converted model is kept: found again, whole or not there, and never in a relative place."""

import pytest

from kvlink.demo import weights
from kvlink.demo.prompts import make_prompts
from kvlink.demo.rows import first_difference


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "Tiny.gguf"
    path.write_bytes(b"GGUF weights")
    return path


def test_a_converted_model_is_found_by_what_is_in_the_file(gguf, monkeypatch):
    monkeypatch.setattr(weights, "_write_model", lambda _, directory: (directory / "config.json").write_text("{}"))
    directory, is_there = weights.find_model(gguf)
    assert not is_there
    weights.convert(gguf, directory)
    assert weights.find_model(gguf) == (directory, True)
    gguf.write_bytes(b"GGUF WEIGHTS")
    other, is_there = weights.find_model(gguf)
    assert other != directory
    assert not is_there


def test_a_conversion_that_fails_leaves_nothing(gguf, monkeypatch):
    def fail(_, directory):
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(weights, "_write_model", fail)
    directory, _ = weights.find_model(gguf)
    with pytest.raises(OSError, match="disk full"):
        weights.convert(gguf, directory)
    assert not list(directory.parent.iterdir())


def test_of_two_conversions_at_once_the_first_wins(gguf, monkeypatch):
    def write(_, directory):
        if not final.exists():
            final.mkdir(parents=True)
            (final / "config.json").write_text("first")
        (directory / "config.json").write_text("second")

    final, _ = weights.find_model(gguf)
    monkeypatch.setattr(weights, "_write_model", write)
    weights.convert(gguf, final)
    assert (final / "config.json").read_text() == "first"
    assert [path.name for path in final.parent.iterdir()] == [final.name]


def test_a_relative_cache_directory_is_ignored(gguf, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    directory, _ = weights.find_model(gguf)
    assert directory.is_relative_to(tmp_path / ".cache/kvlink/models")


def test_no_two_prompts_are_alike():
    for prompt in (None, "Hello"):
        prompts = make_prompts(prompt=prompt, file=None, count=20)
        assert len(set(prompts)) == len(prompts) == 20
    assert make_prompts(prompt="Hello", file=None, count=1) == ["Hello"]


def test_the_document_comes_before_the_question(tmp_path):
    (tmp_path / "document").write_text("Once upon a time.")
    (text,) = make_prompts(prompt="Who?", file=tmp_path / "document", count=1)
    assert text == "Once upon a time.\n\nWho?"


@pytest.mark.parametrize(
    ("tokens", "reference", "index"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [], None)],
)
def test_the_first_difference_is_where_one_ends_too(tokens, reference, index):
    assert first_difference(tokens, reference) == index
