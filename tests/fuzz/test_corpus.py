"""Every input that the tree keeps for a Python target runs here too, without a fuzzer."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

import pytest

from fuzz import corpus, native_targets, seeds
from fuzz.draws import Draws

PYTHON = sorted(path.stem for path in (Path(__file__).parent / "python").glob("[a-z]*.py"))


@pytest.mark.parametrize("target", PYTHON)
def test_kept_inputs_pass(target: str, caplog: pytest.LogCaptureFixture):
    one = importlib.import_module(f"fuzz.python.{target}").one
    kept = corpus.kept(target)
    assert kept
    with caplog.at_level(logging.CRITICAL, logger="kvlink"):  # what peers do wrong is logged, and here they all do
        for data in kept:
            one(data)


def test_each_target_has_a_corpus_and_each_corpus_its_target():
    kept = {path.stem for path in corpus.KEPT.glob("*.zip")}
    assert kept == {*PYTHON, *native_targets.names()}
    assert sum(path.stat().st_size for path in corpus.KEPT.iterdir()) < 1_000_000


def test_equal_inputs_give_equal_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(corpus, "KEPT", tmp_path)
    inputs = seeds.of("channel")
    assert corpus.pack("first", inputs) == corpus.pack("second", reversed(inputs))
    assert (tmp_path / "first.zip").read_bytes() == (tmp_path / "second.zip").read_bytes()
    assert sorted(corpus.kept("first")) == sorted(set(inputs))


def test_a_spoiled_message_is_a_copy_and_the_same_each_time():
    usual = {"a": [1, {"b": "text"}], "c": b"bytes"}
    inputs = [bytes([3, *(step * at % 251 for at in range(20))]) for step in range(1, 200)]
    spoiled = [Draws(data).spoiled(usual) for data in inputs]
    assert usual == {"a": [1, {"b": "text"}], "c": b"bytes"}
    assert [Draws(data).spoiled(usual) for data in inputs] == spoiled
    assert len({repr(one) for one in spoiled}) > 50
