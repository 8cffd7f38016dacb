"""Benchmark client: `python bench/serve.py --base-url http://127.0.0.1:8000`. Owns: sending, timing, reporting.

Works against any server with OpenAI's `/v1/completions` that takes prompts as token ids and `ignore_eos` (this engine,
SGLang, vLLM, llama.cpp). Prints one JSON line per repetition on standard output and a table on standard error, so that
`> figures.jsonl` keeps the lines. Exit status: 0, 1 when a request failed, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from workloads import TOKEN_IDS, WORKLOADS, BenchRequest, Workload

from telemetry.demo.stream_client import StreamRecord, failures, quantile, stream_request

EXAMPLES = """\
examples:
  python bench/serve.py --base-url http://127.0.0.1:8000                      all five workloads, once
  python bench/serve.py --base-url http://127.0.0.1:8000 --workload W4 --rate 2   Poisson arrivals, 2 a second
  python bench/serve.py --base-url http://127.0.0.1:30000 --repeat 3 --json figures.jsonl

W4 with --rate measures latency under load; without, throughput of a full queue.
Cached tokens above 0 in W1, W3 or W5 mean that the server had seen the prompts: give another --seed.
"""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Flags; exits 2 with a message that names flag, value and limit."""
    parser = argparse.ArgumentParser(
        prog="bench/serve.py",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="workloads:\n" + "".join(f"  {w.name}  {w.sentence}\n" for w in WORKLOADS.values()) + "\n" + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--base-url", required=True, help="where the server listens, without /v1")
    parser.add_argument("--model", help="name of the model in the API (default: the first that /v1/models lists)")
    parser.add_argument("--workload", default="all", choices=[*WORKLOADS, "all"], help="which (default: all)")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="repetitions, fresh prompts each (default 1)"
    )
    parser.add_argument("--rate", type=float, metavar="R", help="W4 only: Poisson arrivals, R requests a second")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default 0)")
    parser.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="short requests before the clock (default 1)"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds of silence that fail a request"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the JSON lines to FILE too")
    parser.add_argument("--api-key", help="bearer token (default: the environment's OPENAI_API_KEY, if set)")
    options = parser.parse_args(argv)
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: at least 1")
    if options.warmup < 0:
        parser.error(f"--warmup {options.warmup}: at least 0")
    if options.rate is not None and not 0 < options.rate < math.inf:
        parser.error(f"--rate {options.rate}: above 0 and finite")
    if options.rate is not None and options.workload not in {"all", "W4"}:
        parser.error(f"--rate {options.rate}: only W4 takes a rate, and --workload is {options.workload}")
    if not options.timeout > 0:
        parser.error(f"--timeout {options.timeout}: above 0")
    return options


def arrival_offsets(count: int, *, rate: float | None, rng: random.Random) -> list[float]:
    """When each request is sent, in seconds from the start: all at 0, or the arrivals of a Poisson process."""
    if rate is None:
        return [0.0] * count
    offsets: list[float] = []
    now_s = 0.0
    for _ in range(count):
        offsets.append(now_s)
        now_s += rng.expovariate(rate)
    return offsets


def body_of(request: BenchRequest, *, model: str) -> dict[str, Any]:
    """The request body: greedy, exactly `output_tokens` long."""
    return {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def run_repetition(
    client: httpx.AsyncClient, workload: Workload, *, model: str, seed: int, repetition: int, rate: float | None
) -> list[StreamRecord]:
    """Send one repetition and wait for every answer."""
    requests = workload.requests(seed=seed, repetition=repetition)
    effective_rate = rate if workload.takes_rate else None
    offsets = arrival_offsets(
        len(requests), rate=effective_rate, rng=random.Random(f"arrivals/{workload.name}/{seed}/{repetition}")
    )

    async def one(request: BenchRequest, offset_s: float) -> StreamRecord:
        await asyncio.sleep(offset_s)
        record = await stream_request(client, "/v1/completions", body_of(request, model=model))
        if record.error is None and record.output_tokens != request.output_tokens:
            record.error = f"answered {record.output_tokens} tokens of {request.output_tokens}: is ignore_eos ignored?"
        return record

    return await asyncio.gather(*(one(request, offset) for request, offset in zip(requests, offsets, strict=True)))


def figures(records: Sequence[StreamRecord]) -> dict[str, Any]:
    """Figures of one repetition. Seconds and tokens per second; failed requests count in `failed` and nowhere else."""
    good = [record for record in records if record.error is None]
    start_ns = min(record.sent_ns for record in records)
    end_ns = max(record.done_ns for record in records)
    wall_s = (end_ns - start_ns) / 1e9
    prompt = sum(record.prompt_tokens for record in good)
    output = sum(record.output_tokens for record in good)
    ttft_s = [record.ttft_ns / 1e9 for record in good if record.ttft_ns is not None]
    gaps_s = [gap / 1e9 for record in good for gap in record.gaps_ns()]
    return {
        "requests": len(records),
        "failed": len(records) - len(good),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(record.cached_tokens for record in good),
        "token_events": sum(len(record.token_ns) for record in good),
        "wall_s": round(wall_s, 6),
        "output_tok_s": round(output / wall_s, 3),
        "total_tok_s": round((prompt + output) / wall_s, 3),
        "ttft_p50_s": _rounded(quantile(ttft_s, 0.50)),
        "ttft_p99_s": _rounded(quantile(ttft_s, 0.99)),
        "tbt_p50_s": _rounded(quantile(gaps_s, 0.50)),
        "tbt_p99_s": _rounded(quantile(gaps_s, 0.99)),
    }


def _rounded(value: float) -> float | None:
    """Six places; None (JSON null) where there was nothing to measure."""
    return None if math.isnan(value) else round(value, 6)


#: (field, column title, scale, format)
COLUMNS = (
    ("wall_s", "wall s", 1.0, ".2f"),
    ("output_tok_s", "output tok/s", 1.0, ".1f"),
    ("total_tok_s", "total tok/s", 1.0, ".1f"),
    ("ttft_p50_s", "TTFT p50 ms", 1000.0, ".0f"),
    ("ttft_p99_s", "TTFT p99 ms", 1000.0, ".0f"),
    ("tbt_p50_s", "TBT p50 ms", 1000.0, ".1f"),
    ("tbt_p99_s", "TBT p99 ms", 1000.0, ".1f"),
)


def table_of(lines: Sequence[dict[str, Any]]) -> Table:
    """One row per repetition, and the median of each workload that ran more than once."""
    table = Table(title="bench/serve.py", title_justify="left")
    table.add_column("workload")
    for title in ("run", "requests", "failed", "in", "out", "cached", *(column[1] for column in COLUMNS)):
        table.add_column(title, justify="right", no_wrap=True)
    for name in dict.fromkeys(line["workload"] for line in lines):
        own = [line for line in lines if line["workload"] == name]
        for line in own:
            counts = (
                line[field] for field in ("requests", "failed", "prompt_tokens", "output_tokens", "cached_tokens")
            )
            table.add_row(name, str(line["repetition"]), *(f"{count:,}" for count in counts), *_cells([line]))
        if len(own) > 1:
            table.add_row(name, "median", "", "", "", "", "", *_cells(own), style="bold", end_section=True)
    return table


def _cells(lines: Sequence[dict[str, Any]]) -> list[str]:
    """The figure columns: each the median over `lines`."""
    cells: list[str] = []
    for field, _, scale, spec in COLUMNS:
        known = [line[field] for line in lines if line[field] is not None]
        cells.append(format(statistics.median(known) * scale, spec) if known else "-")
    return cells


async def first_model(client: httpx.AsyncClient) -> str:
    """The first name that `/v1/models` lists; raises httpx.HTTPError or ValueError."""
    response = await client.get("/v1/models")
    response.raise_for_status()
    models = response.json().get("data") or []
    if not models:
        raise ValueError("/v1/models lists no model: give --model")
    return str(models[0]["id"])


async def run(options: argparse.Namespace, console: Console) -> int:
    """The whole benchmark. Returns the exit status."""
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    chosen = list(WORKLOADS.values()) if options.workload == "all" else [WORKLOADS[options.workload]]
    lines: list[dict[str, Any]] = []
    async with httpx.AsyncClient(
        base_url=options.base_url.rstrip("/"),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(options.timeout, connect=10.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,  # a proxy between client and server would be measured too
    ) as client:
        try:
            model = options.model or await first_model(client)
        except (httpx.HTTPError, ValueError) as error:
            console.print(f"{options.base_url}: {type(error).__name__}: {error}", style="red", markup=False)
            return 1
        rng = random.Random(f"warmup/{options.seed}")
        for _ in range(options.warmup):
            warm = BenchRequest(tuple(rng.randint(*TOKEN_IDS) for _ in range(32)), 8)
            await stream_request(client, "/v1/completions", body_of(warm, model=model))
        for workload in chosen:
            for repetition in range(options.repeat):
                line = await _measure(
                    client, workload, repetition=repetition, model=model, options=options, console=console
                )
                lines.append(line)
                print(json.dumps(line), flush=True)
                if options.json is not None:
                    with options.json.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
    console.print(table_of(lines))
    return 1 if any(line["failed"] for line in lines) else 0


async def _measure(
    client: httpx.AsyncClient,
    workload: Workload,
    *,
    repetition: int,
    model: str,
    options: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    """Run one repetition, say what went wrong, and return its JSON line."""
    with console.status(f"{workload.name}: {workload.sentence} ({repetition + 1} of {options.repeat})"):
        records = await run_repetition(
            client, workload, model=model, seed=options.seed, repetition=repetition, rate=options.rate
        )
    errors = failures(records)
    if errors:
        console.print(f"{workload.name}: {len(errors)} failed, the first: {errors[0]}", style="red", markup=False)
    measured = figures(records)
    if measured["cached_tokens"] and not workload.shares_prefix:
        console.print(
            f"{workload.name}: {measured['cached_tokens']} prompt tokens came from the server's cache;"
            f" it had seen seed {options.seed}: give another --seed",
            style="yellow",
            markup=False,
        )
    head = {
        "workload": workload.name,
        "repetition": repetition,
        "seed": options.seed,
        "rate": options.rate if workload.takes_rate else None,
        "model": model,
        "base_url": options.base_url,
    }
    return head | measured


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the script."""
    options = parse_arguments(argv)
    try:
        # Piped into a file, the table keeps its columns instead of rich's 80 characters.
        return asyncio.run(run(options, Console(stderr=True, width=None if sys.stderr.isatty() else 170)))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
