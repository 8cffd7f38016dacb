"""A static batch in transformers. Owns: the peer that is always at hand, in this process, in float32.

All prompts of a workload go in as one batch, and the batch is decoded until the last answer is whole: what one gets
without a server. Prompts must be equally long, so W4 is not for it. No stop tokens, greedy, logits of last rows only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from accuracy import smollm2_oracle
from workloads import BenchRequest

from engine.models.packaged import packaged_gguf_path
from telemetry.demo.stream_client import StreamRecord


def load(path: Path | None) -> Any:
    """transformers' model of a folder, or of the packaged SmolLM2 (None), float32."""
    if path is None:
        return smollm2_oracle(packaged_gguf_path())
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def run(model: Any, requests: Sequence[BenchRequest], *, deadline_ns: int) -> list[StreamRecord]:
    """One batch of all `requests`, whose tokens each arrive with their step.

    Raises TimeoutError past `deadline_ns` of the monotonic clock, ValueError for prompts of different lengths.
    """
    if len({len(request.prompt) for request in requests}) != 1:
        raise ValueError("a static batch needs prompts of one length")
    from transformers import DynamicCache

    sent_ns = time.monotonic_ns()
    records = [StreamRecord(sent_ns=sent_ns, prompt_tokens=len(request.prompt)) for request in requests]
    ids = torch.tensor([request.prompt for request in requests])
    cache = DynamicCache()
    # The argument has another name since transformers 5.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        for step in range(max(request.output_tokens for request in requests)):
            answer = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{name: cache})
            ids = answer.logits[:, -1].argmax(-1, keepdim=True)
            now_ns = time.monotonic_ns()
            for record, request in zip(records, requests, strict=True):
                if step < request.output_tokens:
                    record.token_ns.append(now_ns)
                    record.output_tokens += 1
                    record.done_ns = now_ns
            if now_ns > deadline_ns:
                raise TimeoutError("the time limit is over")
    return records
