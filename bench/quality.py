"""What a numerical mode costs in quality: likelihood of a text, next tokens that stay the same, greedy answers.

    python -m bench.quality [--new-tokens 32] [--json]

Against float32 without quantization, on SmolLM2-135M: the mean negative log likelihood of a public-domain text
(bench/texts/alice.txt, the beginning of "Alice's Adventures in Wonderland", Lewis Carroll, 1865), the share of its
places where the most likely next token is the same, and the share of greedy tokens that are equal before the first
difference, over 20 prompts.

Alone and in company, within one mode: how many of the 20 prompts are answered with the same tokens alone as in a batch
of all, and whether the logits of a prompt's rows and of a decode row are the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `serve` has it: torch reads it when it is imported

import torch
from torch.nn.functional import cross_entropy

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.factory import build_torch_executor
from engine.executor.manual import ManualDriver
from engine.executor.torch_executor import TorchExecutor
from engine.models.packaged import packaged_gguf_path
from engine.text.tokenizer import load_tokenizer

TEXT: Final = Path(__file__).parent / "texts" / "alice.txt"
#: (dtype, quantization, kernels); the first is what the others are compared with.
MODES: Final = (
    ("float32", "none", "torch"),
    ("float32", "none", "native"),
    ("bfloat16", "none", "torch"),
    ("bfloat16", "none", "native"),
    ("float32", "int8", "torch"),
    ("auto", "int8", "native"),
    ("float32", "int8-fast", "torch"),
)
PROMPTS: Final = 20
PROMPT_TOKENS: Final = 24


@dataclass(frozen=True)
class Quality:
    """One mode. `nll` in nats a token, `nll_more` relative to the first mode; shares of 1."""

    mode: str
    nll: float
    nll_more: float
    same_next: float
    same_greedy: float
    same_answers_alone: int
    same_bits_alone: bool


def executor_of(dtype: str, quantization: str, kernels: str) -> TorchExecutor:
    """SmolLM2 in this mode."""
    return build_torch_executor(
        EngineConfig.model_validate(
            {
                "executor": {"dtype": dtype, "quantization": quantization, "kernels": kernels},
                "cache": {"page_size": 16, "num_pages": 256},
            }
        )
    )


def logits_of(executor: TorchExecutor, prompts: list[list[int]]) -> torch.Tensor:
    """[rows, vocab] of all prompts, computed in one batch."""
    driver = ManualDriver(executor)
    work = [(sequence, len(sequence.tokens)) for sequence in (driver.add(f"r{i}", p) for i, p in enumerate(prompts))]
    return executor.forward(driver.batch(work), rows=list(range(sum(map(len, prompts))))).float()


def answers_of(executor: TorchExecutor, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens of each prompt, all in one batch."""
    driver = ManualDriver(executor)
    sequences = [driver.add(f"g{i}", prompt) for i, prompt in enumerate(prompts)]
    driver.generate(sequences, count)
    return [sequence.outputs for sequence in sequences]


def same_bits_alone(executor: TorchExecutor, prompts: list[list[int]]) -> bool:
    """Whether the first prompt has the same logits alone and beside the others: its rows, and the first decode row."""
    found: list[torch.Tensor] = []
    for company in (prompts[:1], prompts):
        driver = ManualDriver(executor)
        sequences = [driver.add(f"c{i}", prompt) for i, prompt in enumerate(company)]
        batch = driver.batch([(sequence, len(sequence.tokens)) for sequence in sequences])
        whole = executor.forward(batch, rows=list(range(PROMPT_TOKENS)))
        driver.step([(sequence, len(sequence.tokens)) for sequence in sequences])
        decode = executor.forward(driver.batch([(sequence, 1) for sequence in sequences]), rows=[0])
        found.append(torch.cat((whole, decode)))
    return torch.equal(*found)


def measure(new_tokens: int) -> list[Quality]:
    """Every mode, in the order of MODES."""
    ids = load_tokenizer(packaged_gguf_path()).encode(TEXT.read_text("utf-8"))
    stride = (len(ids) - PROMPT_TOKENS) // PROMPTS
    prompts = [ids[i * stride : i * stride + PROMPT_TOKENS] for i in range(PROMPTS)]
    found: list[Quality] = []
    first: tuple[float, torch.Tensor, list[list[int]]] | None = None
    for dtype, quantization, kernels in MODES:
        try:
            executor = executor_of(dtype, quantization, kernels)
        except ConfigError as error:  # no kernels in C here
            print(f"{quantization}, {kernels}: left out, {error}")
            continue
        logits, answers = logits_of(executor, [ids]), answers_of(executor, prompts, new_tokens)
        nll = float(cross_entropy(logits[:-1], torch.tensor(ids[1:])))
        first = first or (nll, logits.argmax(-1), answers)
        alone = [answers_of(executor, [prompt], new_tokens)[0] for prompt in prompts]
        found.append(
            Quality(
                mode=f"{dtype if quantization == 'none' else quantization}, {kernels}",
                nll=nll,
                nll_more=nll / first[0] - 1,
                same_next=float((logits.argmax(-1) == first[1]).float().mean()),
                same_greedy=_same(answers, first[2]) / (new_tokens * PROMPTS),
                same_answers_alone=sum(one == other for one, other in zip(alone, answers, strict=True)),
                same_bits_alone=same_bits_alone(executor, prompts),
            )
        )
        executor.close()
    return found


def _same(answers: list[list[int]], others: list[list[int]]) -> int:
    """Tokens that are equal before the first difference of each pair."""
    return sum(
        next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
        for mine, theirs in zip(answers, others, strict=True)
    )


def main() -> None:
    """Print the table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = [asdict(quality) for quality in measure(args.new_tokens)]
    if args.json:
        for row in rows:
            print(json.dumps({"bench": "quality", "torch": torch.__version__, **row}))
        return
    print(f"{'mode':<12}{'nll':>9}{'more':>9}{'same next':>12}{'same greedy':>13}{'alone as in company':>21}  bits")
    for row in rows:
        print(
            f"{row['mode']:<12}{row['nll']:>9.4f}{row['nll_more']:>9.2%}{row['same_next']:>12.3f}"
            f"{row['same_greedy']:>13.3f}{row['same_answers_alone']:>15} of {PROMPTS}  "
            f"{'same' if row['same_bits_alone'] else 'differ'}"
        )


if __name__ == "__main__":
    main()
