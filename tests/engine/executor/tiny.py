"""A tiny random model. Owns: weights for executor tests, without a file and without transformers."""

from __future__ import annotations

import torch

from engine.attention.base import AttentionBackend
from engine.attention.cpu import CpuBackend
from engine.executor.torch_executor import TorchExecutor
from engine.models.llama import LlamaModel
from engine.models.llama_config import LlamaConfig
from engine.models.weights import LayerWeights, LlamaWeights

CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_context_tokens=400,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2, 9),
)


def tiny_weights(config: LlamaConfig = CONFIG, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> LlamaWeights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).to(dtype)

    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, ffn = config.hidden_size, config.intermediate_size
    layers = [
        LayerWeights(
            attention_norm=1 + matrix(hidden),
            qkv=matrix(q_width + 2 * kv_width, hidden),
            attention_out=matrix(hidden, q_width),
            mlp_norm=1 + matrix(hidden),
            gate_up=matrix(2 * ffn, hidden),
            down=matrix(hidden, ffn),
        )
        for _ in range(config.num_layers)
    ]
    table = matrix(config.vocab_size, hidden)
    return LlamaWeights(embedding=table, layers=layers, final_norm=1 + matrix(hidden), lm_head=table)


def tiny_executor(
    *,
    page_size: int = 16,
    num_pages: int = 64,
    attention: AttentionBackend | None = None,
    dtype: torch.dtype = torch.float32,
    poison: bool = True,
    secret: bytes = b"fixed for tests",
    max_context_tokens: int | None = None,
) -> TorchExecutor:
    """An executor on the tiny model. `poison`: every K/V slot is NaN until it is written."""
    executor = TorchExecutor(
        LlamaModel(CONFIG, tiny_weights(dtype=dtype)),
        name="tiny",
        page_size=page_size,
        num_pages=num_pages,
        attention=attention or CpuBackend(dtype=dtype),
        secret=secret,
        max_context_tokens=max_context_tokens,
    )
    if poison:
        executor.kv_cache.fill_(float("nan"))
    return executor
