"""Sampling where the logits are: no tensor is made elsewhere by default."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.executor.base import SamplingRow
from engine.executor.sampler import Sampler
from engine.executor.shaping import shape
from engine.sampling_params import SamplingParams

VOCAB = 700
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=3),
    "plain": SamplingParams(temperature=0.8, seed=1),
    "top k": SamplingParams(temperature=0.8, seed=2, top_k=9),
    "top p": SamplingParams(temperature=0.8, seed=3, top_p=0.9, logprobs=0),
    "min p": SamplingParams(temperature=1.1, seed=4, min_p=0.1),
    "penalties": SamplingParams(
        temperature=0.9, seed=5, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1,
        logit_bias=((7, 2.0), (9, -1.0)),
    ),
    "early": SamplingParams(temperature=0.9, seed=6, min_new_tokens=4),
}  # fmt: skip


class Grammar:
    def allowed(self) -> np.ndarray:
        return np.full(-(-VOCAB // 32), 0x0F0F0F0F, dtype=np.int32)


def rows(names: list[str], *, grammar: bool = False) -> list[SamplingRow]:
    history = np.arange(20, dtype=np.int64) % 11
    return [
        SamplingRow(
            rid=name, row=i, position=20, output_index=3, params=PARAMS[name], history=history,
            grammar=Grammar() if grammar else None,
        )
        for i, name in enumerate(names)
    ]  # fmt: skip


@pytest.mark.parametrize("names", [*([name] for name in PARAMS), list(PARAMS)], ids=[*PARAMS, "all"])
@pytest.mark.parametrize("grammar", [False, True])
def test_every_new_tensor_is_made_where_the_logits_are(names: list[str], grammar: bool) -> None:
    """Made without a device it would be on `meta` here, have no values, and nothing could be chosen from it."""
    logits = torch.randn(len(names), VOCAB, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(vocab_size=VOCAB, eos_token_ids=(2,), secret=b"secret")
    want = sampler.sample(logits, rows(names, grammar=grammar))
    with torch.device("meta"):
        assert sampler.sample(logits, rows(names, grammar=grammar)) == want


@pytest.mark.parametrize("name", ["penalties", "early"])
@pytest.mark.parametrize("grammar", [False, True])
def test_what_comes_from_numpy_is_brought_to_the_logits(name: str, grammar: bool) -> None:
    """Fake tensors refuse operators over two devices, as a GPU does."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.zeros(1, VOCAB, device="meta")
        shaped = shape(logits, rows([name], grammar=grammar), (2,))
    assert shaped.device.type == "meta"
    assert shaped is not logits


def test_a_sampler_keeps_its_keys_on_its_device() -> None:
    sampler = Sampler(vocab_size=VOCAB, eos_token_ids=(2,), device=torch.device("meta"))
    assert sampler._token_keys.device.type == sampler._block_keys.device.type == "meta"
