"""Logit shaping. Owns: what changes a row's logits before anything is chosen: penalties, biases, forbidden tokens.

Everything follows from the tokens that a request has so far, so nothing is kept beside them: a chunked prompt, company
in the batch, a retraction and a recomputation change nothing.

Order: repetition penalty, presence and frequency penalties, bias, then what is forbidden (early ends, the grammar).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from engine.executor.base import SamplingRow
from engine.sampling_params import SamplingParams


def shape(logits: torch.Tensor, rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> torch.Tensor:
    """`logits` [S, vocab] when no row changes them, else a copy in which the rows that do are changed."""
    shaped = logits
    for i, row in enumerate(rows):
        if row.history is None and row.output_index >= row.params.min_new_tokens:
            continue
        if shaped is logits:
            # float32 whatever the model computes in: a penalty is finer than bfloat16 is.
            shaped = logits.float() if logits.dtype is not torch.float32 else logits.clone()
        if row.history is not None:
            _shape_row(shaped[i], row, row.history)
        if row.output_index < row.params.min_new_tokens:
            _forbid_ends(shaped[i], row, eos_token_ids)
    return shaped


def end_tokens(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Tokens that would end an answer, as far as the vocabulary has them."""
    ends = params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)
    return [end for end in ends if 0 <= end < vocab_size]


def _shape_row(logits: torch.Tensor, row: SamplingRow, history: np.ndarray) -> None:
    """Change one row [vocab] in place. history [n] int64: prompt and outputs."""
    params, device = row.params, logits.device
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(history).to(device)
        values = logits[seen]
        # A token that occurs twice is written twice with the same value.
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        outputs, counts = np.unique(history[len(history) - row.output_index :], return_counts=True)
        counted = torch.from_numpy(counts).to(device).float()
        logits[torch.from_numpy(outputs).to(device)] -= params.presence_penalty + params.frequency_penalty * counted
    if params.logit_bias:
        biases = torch.tensor([bias for _, bias in params.logit_bias], device=device)
        logits[[token_id for token_id, _ in params.logit_bias]] += biases
    if row.grammar is not None:
        allowed = np.unpackbits(row.grammar.allowed().view(np.uint8), bitorder="little")[: len(logits)]
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(device), -math.inf)


def _forbid_ends(logits: torch.Tensor, row: SamplingRow, eos_token_ids: Sequence[int]) -> None:
    """An answer below its `min_new_tokens` does not end: its end tokens are -inf."""
    logits[end_tokens(row.params, eos_token_ids, len(logits))] = -math.inf
