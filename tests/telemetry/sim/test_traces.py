"""Readers of traces: what a line becomes, and what is said of one that is wrong."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.cli import main
from telemetry.sim.inputs import trace_format
from telemetry.sim.traces import PACKAGED, AzureTrace, MooncakeTrace, TraceError

GOOD = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [0, 1]}
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def mooncake(folder: Path, *rows: object) -> MooncakeTrace:
    file = folder / "trace.jsonl"
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return MooncakeTrace(file, limit=None, ask_for=None)


def azure(folder: Path, text: str) -> AzureTrace:
    file = folder / "trace.csv"
    file.write_text(text)
    return AzureTrace(file, limit=None, ask_for=None)


def test_a_mooncake_line(tmp_path: Path) -> None:
    [ask] = mooncake(tmp_path, GOOD).asks()
    assert (ask.rid, ask.arrival_ns, ask.prompt_len, ask.output_len) == ("L1", 1_500_000_000, 1000, 7)


def test_equal_blocks_are_equal_pages_and_a_differing_one_ends_them(tmp_path: Path) -> None:
    one, other = mooncake(tmp_path, GOOD, GOOD | {"hash_ids": [0, 2]}).asks()
    left, right = (ask.blocks.pages(16, 0, 62).tolist() for ask in (one, other))
    assert left[:32] == right[:32]
    assert not set(left[32:]) & set(right[32:])


def test_an_equal_block_after_another_start_is_another_prefix(tmp_path: Path) -> None:
    one, other = mooncake(tmp_path, GOOD, GOOD | {"hash_ids": [5, 1]}).asks()
    assert not set(one.blocks.pages(16, 0, 62).tolist()) & set(other.blocks.pages(16, 0, 62).tolist())


def test_a_long_prompt_begins_as_the_short_one_that_it_goes_on_from(tmp_path: Path) -> None:
    """Keys of many blocks are made together, those of few one by one."""
    ids = [2**63 - 1, *range(30)]
    counts = (3, 8, 9, 31)
    rows = [GOOD | {"input_length": 512 * count, "hash_ids": ids[:count]} for count in counts]
    asks = mooncake(tmp_path, *rows).asks()
    found = [ask.blocks.pages(512, 0, count).tolist() for ask, count in zip(asks, counts, strict=True)]
    for keys in found[:-1]:
        assert found[-1][: len(keys)] == keys


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD | {"input_length": "many"}, r":2: input_length: Expected `int`, got `str`"),
        (GOOD | {"input_length": 0}, r":2: input_length is 0; 1 to"),
        (GOOD | {"output_length": -1}, r":2: output_length is -1; 0 to"),
        (GOOD | {"timestamp": -5}, r":2: timestamp is -5"),
        (GOOD | {"hash_ids": [0]}, r":2: hash_ids has 1 entries; an input_length of 1000 has 2 blocks of 512"),
        (GOOD | {"hash_ids": [0, -1]}, r":2: hash_ids holds -1"),
        ({"timestamp": 0}, r":2: .*missing required field `input_length`"),
        ("{broken\n", r":2: no JSON object"),
        (GOOD | {"timestamp": 100}, r":2: arrives 1\.400 s before the line above"),
    ],
)
def test_a_wrong_mooncake_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        list(mooncake(tmp_path, GOOD, row).asks())


def test_an_azure_line(tmp_path: Path) -> None:
    text = HEAD + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.1805901,396,0\n"
    one, other = azure(tmp_path, text).asks()
    assert (one.arrival_ns, one.prompt_len, one.output_len) == (0, 374, 44)
    assert (other.arrival_ns, other.output_len) == (500_000_000, 1)
    assert not set(one.blocks.pages(16, 0, 20).tolist()) & set(other.blocks.pages(16, 0, 20).tolist())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens\n", r":1: no column GeneratedTokens; there are TIMESTAMP, ContextTokens"),
        (HEAD + "yesterday,1,1\n", r":2: TIMESTAMP is 'yesterday'"),
        (HEAD + "2023-11-16 18:15:46,x,1\n", r":2: ContextTokens is 'x'"),
        (HEAD + "2023-11-16 18:15:46,1\n", r":2: GeneratedTokens is None"),
        (HEAD + "2023-11-16 18:15:46,0,1\n", r":2: ContextTokens is 0; 1 to"),
        (HEAD + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n", r":3: TIMESTAMP is .* before the first"),
        (HEAD + "2023-11-16 18:15:46,1,1\n2023-11-16T18:15:47+00:00,1,1\n", r":3: TIMESTAMP is .*time zone"),
    ],
)
def test_a_wrong_azure_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        list(azure(tmp_path, text).asks())


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_whatever_a_file_holds_only_known_errors_come_out(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.mktemp("t") / "trace"
    file.write_bytes(data)
    for kind in (MooncakeTrace, AzureTrace):
        with contextlib.suppress(TraceError):
            list(kind(file, limit=None, ask_for=None).asks())


def test_damaged_compression_is_named(tmp_path: Path) -> None:
    whole = gzip.compress((HEAD + "2023-11-16 18:15:46,1,1\n" * 500).encode())
    (tmp_path / "t.csv.gz").write_bytes(whole[:-20])
    with pytest.raises(TraceError, match=r"t\.csv\.gz: damaged"):
        list(AzureTrace(tmp_path / "t.csv.gz", limit=None, ask_for=None).asks())
    (tmp_path / "t.jsonl.xz").write_bytes(lzma.compress(json.dumps(GOOD).encode())[:-9])
    with pytest.raises(TraceError, match=r"t\.jsonl\.xz: damaged"):
        list(MooncakeTrace(tmp_path / "t.jsonl.xz", limit=None, ask_for=None).asks())


@pytest.mark.parametrize(("name", "kind"), [("mooncake", MooncakeTrace), ("azure-conv", AzureTrace)])
def test_the_traces_of_this_program(name: str, kind: type[MooncakeTrace] | type[AzureTrace]) -> None:
    assert trace_format(PACKAGED[name]) is kind
    trace = kind(PACKAGED[name], limit=50, ask_for=1000)
    asks = list(trace.asks())
    assert trace.total() == len(asks) == 50
    assert all(ask.max_new_tokens >= max(ask.output_len, 1000) for ask in asks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2023-11-16,{}9,1\n".format("9" * 5_000), ":2: ContextTokens is '999"),
        ("2023-11-16,1,{}\n".format("9" * 5_000), ":2: GeneratedTokens is '999"),
        ("2023-11-16,1,{}\n".format("9" * 140_000), ":2: no CSV: field larger than field limit"),
        ("{},1,1\n".format("x" * 5_000), "(5000 characters); a date and time is needed"),
    ],
)
def test_a_field_without_end_is_named_and_not_quoted_whole(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError) as raised:
        list(azure(tmp_path, HEAD + text).asks())
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_header_without_end_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=":1: no CSV"):
        list(azure(tmp_path, "x" * 140_000 + HEAD).asks())


def test_a_trace_without_a_request_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    azure(tmp_path, HEAD)
    assert main(["sim", str(tmp_path / "trace.csv")]) == 2
    assert "trace.csv: no request is in it; there is nothing to simulate" in capsys.readouterr().err
