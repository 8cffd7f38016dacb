"""What a constrained answer costs per token: the mask, putting it on the logits, and taking the token.

    python -m bench.grammar_cost [--repeat 5]

Walks texts that fit their grammars through the packaged SmolLM2's vocabulary, token by token, as the engine would: once
without a grammar (`no grammar` is what every other row of a batch pays), then with each. Prints a table in microseconds
of CPU time per token (median, and the largest), the time to compile, and one JSON line with the machine named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch

from bench.executor_steps import machine
from engine.executor.base import SamplingRow
from engine.executor.shaping import shape
from engine.models.packaged import packaged_gguf_path
from engine.sampling_params import GrammarSpec, SamplingParams
from engine.text.grammar import Grammars
from engine.text.tokenizer import Tokenizer, load_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TEXT = json.dumps({"name": "Ada, Countess of Lovelace", "age": 36, "tags": ["engines", "notes on the engine", "G"]})
CASES = {
    "JSON schema": (GrammarSpec("json_schema", json.dumps(PERSON)), TEXT),
    "any JSON object": (GrammarSpec("json_schema", '{"type":"object"}'), TEXT),
    "regex, narrow": (GrammarSpec("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z"), "2025-12-31T23:59:59Z"),
    "regex, wide": (GrammarSpec("regex", r"(.|\n)*END"), "Whatever comes\nbefore the end of this text, then END"),
}


@dataclass(frozen=True)
class Cost:
    """Microseconds of CPU time per token; `compile_ms` is wall time, once per grammar."""

    case: str
    tokens: int
    compile_ms: float
    mask_us: float
    mask_largest_us: float
    logits_us: float
    push_us: float


def walk(grammars: Grammars, tokenizer: Tokenizer, case: str, repeat: int) -> Cost:
    """Costs of the text of `case` under its grammar."""
    spec, text = CASES[case]
    tokens = tokenizer.encode(text, False)
    started = time.perf_counter_ns()
    grammars.state_of(spec)
    compile_ms = (time.perf_counter_ns() - started) / 1e6
    params = SamplingParams(temperature=0.0, grammar=spec)
    logits = torch.randn(1, tokenizer.vocab_size)
    history = np.arange(4, dtype=np.int64)
    masks, puts, pushes = [], [], []
    for _ in range(repeat):
        state = grammars.state_of(spec)
        for token in tokens:
            begun = time.process_time_ns()
            state.allowed()
            masked = time.process_time_ns()
            shaped = shape(logits, [SamplingRow("r", 0, 4, 0, params, history, state)], ())
            put = time.process_time_ns()
            assert shaped[0, token].isfinite(), f"{case}: {tokenizer.decode([token])!r} is not allowed"
            before_push = time.process_time_ns()
            assert state.push(token)
            pushes.append(time.process_time_ns() - before_push)
            masks.append(masked - begun)
            puts.append(put - masked - (masked - begun))  # `shape` makes the mask once more
    return Cost(
        case=case,
        tokens=len(tokens),
        compile_ms=compile_ms,
        mask_us=statistics.median(masks) / 1e3,
        mask_largest_us=max(masks) / 1e3,
        logits_us=statistics.median(puts) / 1e3,
        push_us=statistics.median(pushes) / 1e3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="walks of each text")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(packaged_gguf_path())
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    started = time.perf_counter_ns()
    grammars.state_of(GrammarSpec("regex", "a"))
    print(f"{machine()}\nvocabulary of {tokenizer.vocab_size} tokens, read once in {ms_since(started):.0f} ms\n")
    costs = [walk(grammars, tokenizer, case, args.repeat) for case in CASES]
    print(
        f"{'us of CPU time per token':<26}{'tokens':>8}{'compile ms':>12}"
        f"{'mask':>8}{'largest':>9}{'logits':>8}{'push':>7}"
    )
    for cost in costs:
        print(
            f"{cost.case:<26}{cost.tokens:>8}{cost.compile_ms:>12.1f}{cost.mask_us:>8.1f}{cost.mask_largest_us:>9.0f}"
            f"{cost.logits_us:>8.1f}{cost.push_us:>7.1f}"
        )
    print(json.dumps({"bench": "grammar_cost", "machine": machine(), "costs": [asdict(cost) for cost in costs]}))


def ms_since(started_ns: int) -> float:
    return (time.perf_counter_ns() - started_ns) / 1e6


if __name__ == "__main__":
    main()
