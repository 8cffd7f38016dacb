"""bench/cpu_peers.py: what it compares, what it refuses, and that whoever is missing is told how to start."""

from __future__ import annotations

import json
import time
from pathlib import Path

import cpu_peers
import peer_tables
import pytest
import static_batch
import torch
from peer_tables import CASES, OURS, Subject
from rich.console import Console
from workloads import BenchRequest

from bench.tiny_model import write_tiny_model


def subject(name: str, **figures: dict[str, float]) -> Subject:
    """One with a repetition of each case: W1={"output_tok_s": 3.0}."""
    made = Subject.named(name, "made up")
    made.lines = {case: [values] for case, values in figures.items()}
    return made


def test_a_quick_run_measures_ours_and_transformers_and_says_how_to_start_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    file = tmp_path / "peers.json"
    flags = ["--quick", "--model", str(folder), "--vocabulary", "258", "--threads", "1", "--json", str(file)]
    flags += ["--case", "W4", "--case", "W5", "--openai", "Other=http://127.0.0.1:9", "--", "--cache.num-pages", "400"]
    assert cpu_peers.main(flags) == 0
    out = capsys.readouterr().out
    document = json.loads(file.read_text())
    ours, batch, vllm, llamacpp, other = document["subjects"]
    assert [line["requests"] for line in ours["lines"]["W4"]] == [10]
    assert (ours["lines"]["W5"][0]["output_tokens"], ours["gaps"]) == (2 * 32, {})
    assert "--cache.num-pages 400" in ours["settings"]
    assert batch["lines"]["W5"][0]["output_tokens"] == 2 * 32
    assert "neither lengths of its own nor arrivals" in batch["gaps"]["W4"]
    assert "vllm serve" in vllm["missing"]
    assert "llama-server" in llamacpp["missing"]
    assert "ConnectError" in other["missing"]
    assert {row["verdict"] for row in document["aims"]} == {"not measured"}
    for words in ("machine: ", "--vllm http", "W5", "output tok/s", "load average"):
        assert words in out


def test_ratios_and_verdicts_by_hand() -> None:
    ours = subject(OURS, W1={"output_tok_s": 300.0}, W3={"ttft_p50_s": 0.3, "tbt_p50_s": 0.02})
    vllm = subject("vLLM", W1={"output_tok_s": 200.0}, W3={"ttft_p50_s": 0.5, "tbt_p50_s": 0.03})
    llamacpp = subject("llama.cpp", W3={"ttft_p50_s": 0.9, "tbt_p50_s": 0.02})
    found = peer_tables.verdicts(ours, {"vLLM": vllm, "llama.cpp": llamacpp}, CASES)
    told = [(row["case"], row["figure"], row["aim"], row["verdict"]) for row in found if row["ratio"] is not None]
    assert told == [
        ("W1", "output_tok_s", 2.0, "missed"),
        ("W1", "output_tok_s", 1.1, "met"),
        ("W3", "ttft_p50_s", 0.55, "missed"),
        ("W3", "tbt_p50_s", 1.0, "met"),
    ]
    assert found[0]["ratio"] == pytest.approx(1.5)


def test_the_better_of_two_peers_has_the_smaller_time() -> None:
    peers = [subject("a", W4={"ttft_p50_s": 0.2}), subject("b", W4={"ttft_p50_s": 0.1})]
    assert peer_tables.best(peers, "W4", "ttft_p50_s") == 0.1
    assert peer_tables.best(peers, "W1", "output_tok_s") is None


def test_medians_are_over_the_repetitions_that_have_the_figure() -> None:
    made = subject("a")
    made.lines["W1"] = [{"output_tok_s": value} for value in (5.0, None, 1.0, 2.0)]
    assert made.median("W1", "output_tok_s") == 2.0
    assert made.median("W2", "output_tok_s") is None


def test_the_table_shows_ratios_of_peers_and_no_row_of_the_missing() -> None:
    ours, vllm = subject(OURS, W1={"output_tok_s": 300.0}), subject("vLLM", W1={"output_tok_s": 200.0})
    absent = Subject.named("llama.cpp", "", "not given")
    console = Console(width=200)
    with console.capture() as capture:
        console.print(peer_tables.figures_table([ours, vllm, absent], CASES[:1]))
    text = capture.get()
    assert "200.0 (1.50)" in text
    assert "llama.cpp" not in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--repeat", "0"], "--repeat 0: at least 1"),
        (["--limit", "nan"], "--limit nan: above 0 and finite"),
        (["--openai", "nameless"], "--openai nameless: NAME=URL"),
        (["--vocabulary", "100"], "--vocabulary 100: above 100"),
        (["--case", "W9"], "invalid choice"),
    ],
)
def test_bad_usage_exits_2_and_says_why(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cpu_peers.main(flags)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_a_server_that_does_not_start_fails_the_run_and_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--no-transformers", "--case", "W5", "--", "--cache.page-size", "0"]
    assert cpu_peers.main(flags) == 1
    assert "--cache.page-size" in capsys.readouterr().out


def test_a_static_batch_ends_at_its_limit_and_wants_equal_lengths(tmp_path: Path) -> None:
    model = static_batch.load(write_tiny_model(tmp_path / "tiny"))
    two = [BenchRequest((100, 101, 102), 3), BenchRequest((103, 104, 105), 5)]
    records = static_batch.run(model, two, deadline_ns=time.monotonic_ns() + 10**12)
    assert [record.output_tokens for record in records] == [3, 5]
    assert records[0].done_ns < records[1].done_ns
    with torch.inference_mode(), pytest.raises(TimeoutError, match="limit"):
        static_batch.run(model, two, deadline_ns=0)
    with pytest.raises(ValueError, match="one length"):
        static_batch.run(model, [two[0], BenchRequest((1,), 2)], deadline_ns=0)
