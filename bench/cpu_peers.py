"""`make bench-cpu-peers`: this engine's server against others on the same machine, in the same run, on W1 to W5.

    python bench/cpu_peers.py [--vllm URL] [--llamacpp URL] [--openai NAME=URL ...] [--quick] [--repeat N] [-- FLAGS]

Its own server is started by itself with journal, metrics, read model and checker on; FLAGS after `--` go to
`admitscope serve`. A static batch of transformers in float32 is always there. Other servers are found by URL; one that
is not given is a row that says how to start it. All share the processor, so let nothing else run. Exit status 0 whoever
wins, 1 when our own server failed, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import serve
import static_batch
from local import machine, wait_until_ready
from peer_tables import CASES, OURS, Case, Subject, aims_table, figures_table, verdicts
from rich.console import Console
from workloads import TOKEN_IDS, WORKLOADS, BenchRequest, Workload

from telemetry.demo.processes import Child
from telemetry.demo.stream_client import StreamRecord, failures, stream_request
from telemetry.ports import free_port

HOW: Final = {
    "vLLM": "VLLM_CPU_OMP_THREADS_BIND=0-1 vllm serve HuggingFaceTB/SmolLM2-135M-Instruct --dtype float32 --port 8010, "
    "then --vllm http://127.0.0.1:8010",
    "llama.cpp": "llama-server -m SmolLM2-135M-Instruct-Q4_0.gguf --no-kv-unified -fa off -np 8 -c 16384 --port 8011, "
    "then --llamacpp http://127.0.0.1:8011",
}
_HOST: Final = "127.0.0.1"
_WARM_UP: Final = BenchRequest(tuple(range(TOKEN_IDS[0], TOKEN_IDS[0] + 32)), 8)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Flags; exits 2 with a message that names flag, value and limit."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        prog="bench/cpu_peers.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--vllm", metavar="URL", help="where a vLLM server listens, without /v1")
    parser.add_argument("--llamacpp", metavar="URL", help="where llama-server listens, without /v1")
    parser.add_argument(
        "--openai", metavar="NAME=URL", action="append", default=[], help="any other server, repeatable"
    )
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="which (default: all)")
    parser.add_argument("--model", type=Path, help="folder of the model, ours and transformers' (default: SmolLM2)")
    parser.add_argument("--vocabulary", type=int, metavar="N", help="prompts of ids below N, for a small vocabulary")
    parser.add_argument("--threads", type=int, help="of our server and of transformers (default: torch's choice)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions; medians are shown (default 3)")
    parser.add_argument("--quick", action="store_true", help="once, a quarter of the requests, a quarter of the tokens")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds per repetition (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default 0)")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE")
    options = parser.parse_args(words[:split])
    options.serve_flags = words[split + 1 :]
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: at least 1")
    if not 0 < options.limit < math.inf:
        parser.error(f"--limit {options.limit}: above 0 and finite")
    if options.vocabulary is not None and options.vocabulary <= TOKEN_IDS[0]:
        parser.error(f"--vocabulary {options.vocabulary}: above {TOKEN_IDS[0]}")
    for pair in options.openai:
        name, _, url = pair.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            parser.error(f"--openai {pair}: NAME=URL is needed, as in SGLang=http://127.0.0.1:30000")
    return options


def requests_of(case: Case, options: argparse.Namespace) -> Callable[[random.Random], list[BenchRequest]]:
    """The case's requests: all of them, or with --quick a quarter, ids below --vocabulary."""
    build = WORKLOADS[case.workload].build

    def build_cut(rng: random.Random) -> list[BenchRequest]:
        made = build(rng)
        if options.quick:
            made = [
                BenchRequest(request.prompt, max(2, request.output_tokens // 4))
                for request in made[: max(1, len(made) // 4)]
            ]
        if options.vocabulary is not None:
            room = options.vocabulary - TOKEN_IDS[0]
            made = [
                BenchRequest(tuple(TOKEN_IDS[0] + i % room for i in request.prompt), request.output_tokens)
                for request in made
            ]
        return made

    return build_cut


def workload_of(case: Case, options: argparse.Namespace) -> Workload:
    return replace(WORKLOADS[case.workload], build=requests_of(case, options))


async def measure_server(subject: Subject, url: str, cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Fill `subject` with what the server at `url` does; what it cannot do is said in it."""
    async with httpx.AsyncClient(
        base_url=url.rstrip("/"),
        timeout=httpx.Timeout(options.limit, connect=10.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,  # a proxy between client and server would be measured too
    ) as client:
        try:
            model = await serve.first_model(client)
        except (httpx.HTTPError, ValueError) as error:
            subject.missing = f"{url}: {type(error).__name__}: {error}"
            return
        subject.settings += f", model {model}"
        await stream_request(client, "/v1/completions", serve.body_of(_WARM_UP, model=model))
        for case in cases:
            for repetition in range(options.repeat):
                run = serve.run_repetition(
                    client,
                    workload_of(case, options),
                    model=model,
                    seed=options.seed + (case.rate is not None),
                    repetition=repetition,
                    rate=case.rate,
                )
                try:
                    records = await asyncio.wait_for(run, options.limit)
                except TimeoutError:
                    subject.gaps[case.name] = f"not through within {options.limit:g} s"
                    break
                take(subject, case, records)


async def first_token(url: str) -> None:
    """Ask for one token. Raises RuntimeError when none comes."""
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client:
        model = await serve.first_model(client)
        request = replace(_WARM_UP, output_tokens=1)
        record = await stream_request(client, "/v1/completions", serve.body_of(request, model=model))
    if errors := failures([record]):
        raise RuntimeError(f"no first token: {errors[0]}")


def measure_transformers(subject: Subject, cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Fill `subject` with what one static batch does."""
    import torch

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = static_batch.load(options.model)
    subject.settings += f", {torch.get_num_threads()} threads"
    deadline_ns = time.monotonic_ns() + int(options.limit * 1e9)
    static_batch.run(model, [_WARM_UP], deadline_ns=deadline_ns)
    for case in cases:
        if WORKLOADS[case.workload].takes_rate:
            subject.gaps[case.name] = "a static batch has neither lengths of its own nor arrivals"
            continue
        for repetition in range(options.repeat):
            made = workload_of(case, options).requests(seed=options.seed, repetition=repetition)
            deadline_ns = time.monotonic_ns() + int(options.limit * 1e9)
            try:
                records = static_batch.run(model, made, deadline_ns=deadline_ns)
            except TimeoutError:
                subject.gaps[case.name] = f"not through within {options.limit:g} s"
                break
            take(subject, case, records)


def take(subject: Subject, case: Case, records: Sequence[StreamRecord]) -> None:
    """Keep one repetition. One with failed requests has no figures: fewer answers would look like faster ones."""
    errors = failures(records)
    if errors:
        subject.gaps[case.name] = f"{len(errors)} of {len(records)} requests failed, the first: {errors[0]}"
        return
    subject.lines.setdefault(case.name, []).append(serve.figures(records))


def measure_ours(cases: Sequence[Case], options: argparse.Namespace, say: Callable[[str], None]) -> Subject:
    """Start the server, measure it, stop it."""
    port = free_port(_HOST, 0)
    url = f"http://{_HOST}:{port}"
    flags = ["--server.port", str(port), *options.serve_flags]
    if options.model is not None:
        flags = ["--model.path", str(options.model), *flags]
    if options.threads is not None:
        flags = ["--executor.threads", str(options.threads), *flags]
    subject = Subject.named(OURS, " ".join(["serve", *flags]))
    with tempfile.TemporaryDirectory() as folder:
        journal = (
            [] if any(flag.startswith("--journal") for flag in flags) else ["--journal", str(Path(folder) / "journals")]
        )
        child = Child("server", "telemetry.cli", ["serve", *flags, *journal], log=Path(folder) / "server.log")
        try:
            started_ns = time.monotonic_ns()
            wait_until_ready(url, child)
            asyncio.run(first_token(url))
            since_start_s = (time.monotonic_ns() - started_ns) / 1e9
            say(f"{OURS} gave its first token {since_start_s:.1f} s after its start")
            subject.settings += f", first token {since_start_s:.1f} s after its start"
            asyncio.run(measure_server(subject, url, cases, options))
            peak = _peak_mib(child.pid)
            subject.settings += "" if peak is None else f", resident at most {peak:,.0f} MiB"
        except RuntimeError as error:
            subject.missing = str(error)
        finally:
            child.stop(30.0)
    return subject


def _peak_mib(pid: int) -> float | None:
    """Largest resident memory of a process so far, its model included; None where /proc does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM")), None)


def peers_of(options: argparse.Namespace) -> list[tuple[Subject, str | None]]:
    """Servers by URL; None for one that is not given."""
    known = [("vLLM", options.vllm), ("llama.cpp", options.llamacpp)]
    known += [tuple(pair.split("=", 1)) for pair in options.openai]
    return [
        (Subject.named(name, url or "", None if url else f"not given: {HOW[name]}"), url or None) for name, url in known
    ]


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    options = parse_arguments(argv)
    if options.quick:
        options.repeat = 1
    cases = [case for case in CASES if not options.case or case.name in options.case]
    # Piped into a file, the tables keep their columns.
    console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    say = Console(stderr=True, highlight=False).print
    console.print(f"machine: {machine()}; {_versions()}", markup=False)
    size = "quick: a quarter of the requests and tokens, once" if options.quick else f"medians of {options.repeat}"
    console.print(f"{size}; load average at the start {_load()}\n", markup=False)
    ours = measure_ours(cases, options, say)
    subjects = [ours]
    if not options.no_transformers:
        batch = Subject.named("transformers", "one static batch, float32, no server")
        say(f"{batch.name} ...")
        measure_transformers(batch, cases, options)
        subjects.append(batch)
    for peer, url in peers_of(options):
        if url is not None:
            say(f"{peer.name} ...")
            asyncio.run(measure_server(peer, url, cases, options))
        subjects.append(peer)
    found = verdicts(ours, {subject.name: subject for subject in subjects}, cases)
    _show(console, subjects, cases, found)
    if options.json is not None:
        head = {"bench": "cpu_peers", "machine": machine(), "versions": _versions(), "size": size, "load": _load()}
        document = head | {"subjects": [_plain(subject) for subject in subjects], "aims": found}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0 if ours.missing is None and not ours.gaps else 1


def _show(console: Console, subjects: Sequence[Subject], cases: Sequence[Case], found: Any) -> None:
    console.print(figures_table(subjects, cases))
    for subject in subjects:
        console.print(f"{subject.name}: {subject.missing or subject.settings}", markup=False, soft_wrap=True)
        for case, why in subject.gaps.items():
            console.print(f"  {case}: {why}", markup=False, soft_wrap=True)
    console.print()
    console.print(aims_table(found))
    console.print(f"load average at the end {_load()}", markup=False)


def _plain(subject: Subject) -> dict[str, Any]:
    return {name: getattr(subject, name) for name in ("name", "settings", "missing", "lines", "gaps")}


def _versions() -> str:
    import torch
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def _load() -> str:
    try:
        return Path("/proc/loadavg").read_text("ascii").split()[0]
    except OSError:
        return "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
