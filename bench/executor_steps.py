"""Milliseconds per executor step: decode of 1, 8 and 32 rows, prefill of 256 and 512 tokens.

    python bench/executor_steps.py [--model PATH] [--dtype auto] [--quantization int8] [--context 300] [--profile]

Prints a table and one JSON line with the machine named. Medians; the best of a quiet machine is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `serve` has it: torch reads it when it is imported

import numpy as np
import torch

from engine.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig
from engine.executor.factory import build_torch_executor
from engine.executor.manual import ManualDriver
from engine.executor.torch_executor import TorchExecutor


def machine() -> str:
    """Processor model, cores seen by torch, torch version."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    flags = info.read_text()
    extras = [flag for flag in ("avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16") if flag in flags]
    name = names[0] if names else platform.processor()
    cpus = f"{name}, {len(names)} CPUs ({', '.join(extras)})"
    return f"{cpus}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def decode_ms(executor: TorchExecutor, *, rows: int, context: int, steps: int) -> float:
    """Median of `steps` decode steps of `rows` requests at about `context` tokens each."""
    rng = np.random.default_rng(0)
    driver = ManualDriver(executor)
    vocab = executor.info().vocab_size
    sequences = [driver.add(f"r{i}", rng.integers(100, vocab - 100, context + 7 * i).tolist()) for i in range(rows)]
    for sequence in sequences:
        driver.step([(sequence, sequence.missing_len)])
    times = []
    for _ in range(steps):
        started = time.perf_counter_ns()
        driver.step([(sequence, 1) for sequence in sequences])
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1e6


def prefill_ms(executor: TorchExecutor, *, tokens: int, prefix: int, steps: int) -> float:
    """Median of `steps` prefills of `tokens` tokens behind `prefix` computed ones."""
    rng = np.random.default_rng(1)
    driver = ManualDriver(executor)
    vocab = executor.info().vocab_size
    times = []
    for i in range(steps):
        sequence = driver.add(f"p{i}", rng.integers(100, vocab - 100, prefix + tokens).tolist())
        if prefix:
            driver.step([(sequence, prefix)])
        started = time.perf_counter_ns()
        driver.step([(sequence, tokens)])
        times.append(time.perf_counter_ns() - started)
        driver.release(sequence)
    return statistics.median(times) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="GGUF file or folder (default: packaged SmolLM2)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--quantization", choices=("auto", "none", "int8", "int8-fast"), default="auto")
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--context", type=int, default=300, help="context of decode rows, in tokens")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--profile", action="store_true", help="print where 8-row decode steps spend their time")
    args = parser.parse_args()
    config = EngineConfig(
        model=ModelConfig(path=args.model),
        cache=CacheConfig(page_size=args.page_size, num_pages=-(-32 * (args.context + 400) // args.page_size)),
        executor=ExecutorConfig(
            dtype=args.dtype, threads=args.threads, quantization=args.quantization, kernels=args.kernels
        ),
    )
    executor = build_torch_executor(config)
    figures: dict[str, float] = {}
    for rows in (1, 8, 32):
        figures[f"decode_{rows}"] = decode_ms(executor, rows=rows, context=args.context, steps=40)
    for tokens in (256, 512):
        figures[f"prefill_{tokens}"] = prefill_ms(executor, tokens=tokens, prefix=0, steps=8)
    figures["prefill_256_after_512"] = prefill_ms(executor, tokens=256, prefix=512, steps=8)
    info = executor.info()
    print(
        f"{info.model}, {info.dtype}, {info.kernels}\n"
        f"page {args.page_size}, decode context {args.context}\n{machine()}\n"
    )
    print(f"{'step':<24}{'ms':>10}{'tok/s':>10}")
    for name, ms in figures.items():
        tokens = int(name.split("_")[1])
        print(f"{name:<24}{ms:>10.2f}{tokens / ms * 1e3:>10.0f}")
    rounded = {name: round(ms, 3) for name, ms in figures.items()}
    print(json.dumps({"bench": "executor_steps", "dtype": executor.info().dtype, "machine": machine(), "ms": rounded}))
    if args.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            decode_ms(executor, rows=8, context=args.context, steps=20)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


if __name__ == "__main__":
    main()
