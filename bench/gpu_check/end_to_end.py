"""Section 12. Owns: decode steps of a whole model, with either table of small operators, against the time that reading
its weights and K/V takes at least."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from bench.gpu_check.random_model import (
    EIGHT_BILLION,
    SMALL,
    executor_of,
    in_the_middle,
    model_of,
    random_weights,
    shape,
)
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import Rig
from bench.gpu_check.speed import Ceilings
from engine.executor.manual import ManualDriver
from engine.models.llama import LlamaModel
from engine.models.llama_config import LlamaConfig

#: The aim of docs/gpu.md, for 8 billion weights, 64 rows, context 2048, with graphs.
FLOOR_AIM = 0.8
STEPS = 20
#: SmolLM2-135M's shape: bound by launches, so a test of graphs and not of kernels.
SMOL = shape(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49_152)


def decode_steps(rig: Rig, ceilings: Ceilings) -> Iterator[Finding]:
    """Whole steps as the engine's executor does them, planning and sampling included; wall time of the host."""
    shapes = (
        ((SMALL, (1, 4), 32),) if rig.sizes.shrink > 1 else ((SMOL, (1, 16, 128), 512), (EIGHT_BILLION, (64,), 2048))
    )
    for config, batches, context in shapes:
        drawn = random_weights(rig, config)
        models = {ops: model_of(config, drawn, make_ops) for ops, make_ops in rig.ops().items()}
        for rows in batches:
            for graph_rows in (0, rows):
                for ops, model in models.items():
                    yield _steps(rig, ceilings, model, ops, rows, context, graph_rows)
        del drawn, models, model


def _steps(
    rig: Rig, ceilings: Ceilings, model: LlamaModel, ops: str, rows: int, context: int, graph_rows: int
) -> Finding:
    steps = STEPS + 3
    pages = rows * -(-(context + steps) // 16)
    executor = executor_of(rig, model, num_pages=pages, graph_rows=graph_rows)
    driver = ManualDriver(executor)
    sequences = in_the_middle(driver, rig, [context] * rows, room=steps)
    times = []
    for _ in range(steps):
        start = time.perf_counter_ns()
        driver.step([(sequence, 1) for sequence in sequences])
        times.append(time.perf_counter_ns() - start)
    executor.close()
    seconds = statistics.median(times[3:]) / 1e9
    read = bytes_read(model.config, rows, context, rig.sizes.dtype.itemsize)
    share = read / ceilings.copy_bytes_s / seconds if ceilings.copy_bytes_s else 0.0
    is_aim = model.config == EIGHT_BILLION and graph_rows > 0
    kind = "graphs" if graph_rows else "eager"
    name = f"{weights(model.config) / 1e9:.2f} billion weights, {rows} rows, context {context}, {kind}, {ops}"
    note = f"{seconds * 1e3:.2f} ms a step, {rows / seconds:,.0f} tokens/s"
    return Finding(name, None, share, "of the floor", FLOOR_AIM if is_aim else None, note)


def weights(config: LlamaConfig) -> int:
    """Weights that a step multiplies by: those of the layers and of the head."""
    attention = config.hidden_size * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer + config.vocab_size * config.hidden_size


def bytes_read(config: LlamaConfig, rows: int, context: int, itemsize: int) -> int:
    """What a decode step reads at least: all weights once, and the K/V of every row."""
    return weights(config) * itemsize + rows * context * config.kv_bytes_per_token(itemsize)
