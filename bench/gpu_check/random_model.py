"""Models of random weights. Owns: shapes to compute with where no file is needed, made on the device itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from bench.gpu_check.rig import Rig
from engine.executor.manual import ManualDriver, ManualSequence
from engine.executor.torch_executor import Gpu, TorchExecutor
from engine.models.llama import LlamaModel
from engine.models.llama_config import LlamaConfig
from engine.models.ops import MakeOps, TorchOps
from engine.models.weights import LayerWeights, LlamaWeights


def shape(  # the numbers of a model card
    *, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, vocab: int
) -> LlamaConfig:
    """A Llama of this shape for contexts of up to 32,768 tokens."""
    return LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head_dim, max_context_tokens=32_768, rope_theta=10_000.0, rms_norm_eps=1e-5,
        tied_embeddings=True, bos_token_id=None, eos_token_ids=(1,),
    )  # fmt: skip


#: A small one with heads that the kernels have, and one of 8 billion weights (Llama 3).
SMALL = shape(layers=4, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=4096)
EIGHT_BILLION = shape(layers=32, hidden=4096, ffn=14_336, heads=32, kv_heads=8, head_dim=128, vocab=128_256)


def random_model(rig: Rig, config: LlamaConfig, make_ops: MakeOps = TorchOps) -> LlamaModel:
    """A model of random weights, the same ones each time."""
    return model_of(config, random_weights(rig, config), make_ops)


def model_of(config: LlamaConfig, weights: LlamaWeights, make_ops: MakeOps) -> LlamaModel:
    """A model of `weights`, which stay whole. On a GPU models of the same weights share them."""
    return LlamaModel(config, replace(weights, layers=list(weights.layers)), make_ops=make_ops)


def random_weights(rig: Rig, config: LlamaConfig) -> LlamaWeights:
    """Random weights, small enough that activations stay finite through all layers."""
    generator = torch.Generator(device=rig.device).manual_seed(1)

    def matrix(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=rig.device, dtype=rig.sizes.dtype).mul_(0.02)

    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, ffn = config.hidden_size, config.intermediate_size
    table = matrix(config.vocab_size, hidden)
    layers = [
        LayerWeights(
            attention_norm=1 + matrix(hidden),
            qkv=matrix(q + 2 * kv, hidden),
            attention_out=matrix(hidden, q),
            mlp_norm=1 + matrix(hidden),
            gate_up=matrix(2 * ffn, hidden),
            down=matrix(hidden, ffn),
        )
        for _ in range(config.num_layers)
    ]
    return LlamaWeights(table, layers, 1 + matrix(hidden), table)


def executor_of(
    rig: Rig, model: LlamaModel, *, num_pages: int, graph_rows: int = 0, page_size: int = 16
) -> TorchExecutor:
    """As the engine has it, over a pool that is full of random K/V."""
    from engine.attention.flashinfer import HeadShape

    facts = model.config
    executor = TorchExecutor(
        model,
        name="random",
        page_size=page_size,
        num_pages=num_pages,
        attention=rig.backend(HeadShape(facts.num_heads, facts.num_kv_heads, facts.head_dim)),
        secret=b"gpu_check",
        gpu=Gpu(rig.runtime, graph_rows=graph_rows),
    )
    executor.kv_cache.normal_()
    return executor


def in_the_middle(
    driver: ManualDriver, rig: Rig, contexts: Sequence[int], *, page_size: int = 16, room: int = 0
) -> list[ManualSequence]:
    """Requests that have `contexts` tokens, all but the last of them in the pool, and pages for `room` more."""
    vocab = driver.executor.info().vocab_size
    sequences, taken = [], 0
    for i, context in enumerate(contexts):
        sequence = driver.add(f"r{i}", rig.rng.integers(0, vocab, context).tolist())
        count = -(-(context + room) // page_size)
        sequence.pages = np.arange(taken, taken + count).tolist()
        taken += count
        sequence.computed_len = context - 1
        sequences.append(sequence)
    return sequences
