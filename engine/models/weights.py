"""Weights. Owns: the canonical form in which loaders hand weights to the model, whatever the file format."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer; matrices are [out, in]. Biases and head norms are None where the model has none.

    qkv      [(Hq + 2 Hkv) D, hidden]  q rows, then k, then v, in rotate-half order; `qkv_bias` alike
    gate_up  [2 ffn, hidden]           gate rows, then up; `gate_up_bias` alike
    q_norm, k_norm   [D]               of each head, before it is turned
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    attention_out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(slots=True)
class LlamaWeights:
    """All weights. `lm_head` [vocab, hidden] is the embedding tensor itself when tied."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    lm_head: torch.Tensor


def move(weights: LlamaWeights, device: torch.device) -> None:
    """Move every tensor to `device`, one after another, so that no layer is in both places for long."""
    is_tied = weights.lm_head is weights.embedding
    weights.embedding = weights.embedding.to(device)
    weights.final_norm = weights.final_norm.to(device)
    weights.lm_head = weights.embedding if is_tied else weights.lm_head.to(device)
    for layer in weights.layers:
        for field in fields(layer):
            tensor = getattr(layer, field.name)
            if tensor is not None:
                setattr(layer, field.name, tensor.to(device))
