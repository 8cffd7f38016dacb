"""Sections 7 and 8. Owns: whole answers, on the GPU against the CPU, and on the GPU cut and batched in other ways.

Rounding may turn the choice between two tokens that are nearly as likely. So answers have to be equal up to the first
place where the two best are nearer than `MARGIN` to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu_check.random_model import executor_of
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import Rig
from engine.attention.cpu import CpuBackend
from engine.executor.manual import ManualDriver, ManualSequence
from engine.executor.torch_executor import TorchExecutor
from engine.models.loader import load_model
from engine.models.ops import MakeOps, TorchOps
from engine.models.packaged import packaged_gguf_path
from engine.sampling_params import SamplingParams
from engine.text.tokenizer import load_tokenizer

#: Difference of the two best log-probabilities (natural logarithm) below which either may come.
MARGIN = 0.1
#: Greedy, and telling the two best.
GREEDY = SamplingParams(max_new_tokens=1 << 20, temperature=0.0, ignore_eos=True, logprobs=2)
TEXT = Path(__file__).parents[1] / "texts" / "alice.txt"
PAGE = 16


def prompts_of(rig: Rig, path: Path) -> list[list[int]]:
    """Pieces of a public-domain text, from 8 to 119 tokens long."""
    ids = load_tokenizer(path).encode(TEXT.read_text("utf-8"))
    lengths = 8 + rig.rng.integers(0, 112, rig.sizes.prompts)
    starts = rig.rng.integers(0, len(ids) - 128, rig.sizes.prompts)
    return [ids[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]


def against_cpu(rig: Rig, path: Path | None = None) -> Iterator[Finding]:
    """Section 7: SmolLM2-135M, greedy, on the GPU in its type against float32 on the CPU."""
    path = path or packaged_gguf_path()
    prompts = prompts_of(rig, path)
    want = _answers(_on_cpu(path, _pages(prompts, rig)), prompts, rig.sizes.answer_tokens)
    for ops, make_ops in rig.ops().items():
        for graph_rows in (0, rig.sizes.prompts):
            executor = _on_gpu(rig, path, _pages(prompts, rig), graph_rows, make_ops)
            got = _answers(executor, prompts, rig.sizes.answer_tokens)
            kind = "with graphs" if graph_rows else "eager"
            yield agreement(
                f"{len(prompts)} answers of {rig.sizes.answer_tokens} tokens, {kind}, {ops}, against the CPU", got, want
            )


def against_itself(rig: Rig, path: Path | None = None) -> Iterator[Finding]:
    """Section 8: chunked against whole, mixed against separate, cached against cold, all on the GPU."""
    path = path or packaged_gguf_path()
    prompts = prompts_of(rig, path)[: max(4, rig.sizes.prompts // 4)]
    count = rig.sizes.answer_tokens
    executor = _on_gpu(rig, path, 2 * _pages(prompts, rig))
    want = _answers(executor, prompts, count)

    driver = ManualDriver(executor)
    sequences = [driver.add(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    while pending := [s for s in sequences if not s.outputs]:
        driver.step([(s, min(7, s.missing_len)) for s in pending])
    driver.generate(sequences, count)
    yield agreement("prompts in pieces of 7 tokens against whole ones", sequences, want)

    driver = ManualDriver(executor, page_order=rig.rng.permutation(executor.info().num_pages).tolist())
    running: list[ManualSequence] = []
    for i, prompt in enumerate(prompts):
        late = driver.add(f"r{i}", prompt, GREEDY)
        riding = [s for s in running if len(s.outputs) < count]
        driver.step([(late, late.missing_len), *((s, 1) for s in riding)])
        running.append(late)
    driver.generate(running, count)
    yield agreement("decode rows beside prompts, pages in another order, against separate steps", running, want)

    driver = ManualDriver(executor)
    cold = [driver.add(f"cold{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    driver.step([(s, s.missing_len) for s in cold])
    cached = [
        driver.add(f"r{i}", prompt, GREEDY, cached=cold[i], cached_pages=(len(prompt) - 1) // PAGE)
        for i, prompt in enumerate(prompts)
    ]
    driver.generate(cached, count)
    yield agreement("prompts whose full pages are cached against cold ones", cached, want)


def agreement(name: str, got: list[ManualSequence], want: list[ManualSequence]) -> Finding:
    """Are the answers equal up to the first near tie of `want`; the value counts those that are not."""
    wrong = ties = 0
    for one, other in zip(got, want, strict=True):
        place = first_difference(one.outputs, other.outputs)
        if place is None:
            continue
        if any(margin_of(other, i) < MARGIN for i in range(place + 1)):
            ties += 1
        else:
            wrong += 1
    note = f"{len(want) - wrong - ties} equal, {ties} part after two tokens that were nearer than {MARGIN}"
    return Finding(name, wrong == 0, wrong, "answers", 0, note)


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The first place where they differ, also by their ends; None if they do not."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return i
    return None if len(one) == len(other) else min(len(one), len(other))


def margin_of(sequence: ManualSequence, place: int) -> float:
    """How far the best token of an answer was ahead of the second best, in log-probability."""
    if place >= len(sequence.sampled):
        return float("inf")
    logprobs = sequence.sampled[place].logprobs
    assert logprobs is not None
    (_, best), (_, second) = logprobs.top
    return best - second


def _answers(executor: TorchExecutor, prompts: list[list[int]], count: int) -> list[ManualSequence]:
    driver = ManualDriver(executor)
    sequences = [driver.add(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    driver.generate(sequences, count)
    return sequences


def _pages(prompts: list[list[int]], rig: Rig) -> int:
    return sum(-(-(len(prompt) + rig.sizes.answer_tokens) // PAGE) for prompt in prompts)


def _on_cpu(path: Path, pages: int) -> TorchExecutor:
    model = load_model(path, dtype=torch.float32)
    attention = CpuBackend(windows=model.config.windows)
    return TorchExecutor(model, name="cpu", page_size=PAGE, num_pages=pages, attention=attention, secret=b"gpu_check")


def _on_gpu(rig: Rig, path: Path, pages: int, graph_rows: int = 0, make_ops: MakeOps = TorchOps) -> TorchExecutor:
    model = load_model(path, dtype=rig.sizes.dtype, device=rig.device, make_ops=make_ops)
    return executor_of(rig, model, num_pages=pages, graph_rows=graph_rows)
