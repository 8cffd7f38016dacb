"""LlamaModel. Owns: the arithmetic of a Llama-family decoder over one flattened batch; knows no request and no page.

Everything that does not depend on the batch is prepared once: fused matrices, their layouts, the rotary tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import embedding, silu

from engine.attention.base import AttentionBackend
from engine.models.decoder import LayerCache
from engine.models.linear import Fill, Linear
from engine.models.llama_config import LlamaConfig
from engine.models.norm import rms_norm
from engine.models.quantized import Quantization, QuantizedLinear
from engine.models.rope import rope_tables, rotate
from engine.models.weights import LayerWeights, LlamaWeights

AnyLinear = Linear | QuantizedLinear


@dataclass(slots=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: AnyLinear
    attention_out: AnyLinear
    mlp_norm: torch.Tensor
    gate_up: AnyLinear
    down: AnyLinear
    qk_norm: torch.Tensor | None


class LlamaModel:
    """A decoder ready to run where its weights are. `config` holds its facts (RoPE, end tokens, context)."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights, *, quantization: Quantization = "none") -> None:
        """Takes `weights` apart: each matrix is dropped as soon as it is in its final layout."""
        linear = partial(quantized_or_not, quantization=quantization, fill=Fill())
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._embedding = weights.embedding
        self._final_norm = weights.final_norm
        self.quantization = quantization
        self.kernels = "torch's kernels"
        self._lm_head = linear(weights.lm_head, wide=True)
        self._layers: list[_Layer] = []
        weights.layers.reverse()
        while weights.layers:
            layer = weights.layers.pop()
            self._layers.append(
                _Layer(
                    attention_norm=layer.attention_norm,
                    qkv=linear(layer.qkv, layer.qkv_bias),
                    attention_out=linear(layer.attention_out, layer.attention_out_bias),
                    mlp_norm=layer.mlp_norm,
                    gate_up=linear(layer.gate_up, layer.gate_up_bias),
                    down=linear(layer.down, layer.down_bias),
                    qk_norm=_qk_norm(config, layer),
                )
            )
        self._cos, self._sin = self._rope_tables(0)

    def reserve_positions(self, count: int) -> None:
        """Make positions below `count` usable. Left to the executor: its pool may hold far less than the context."""
        if count > len(self._cos):
            self._cos, self._sin = self._rope_tables(count)

    def _rope_tables(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Made on the CPU everywhere: angles that differ in the last bit between devices would be one more difference.
        cos, sin = rope_tables(self.config, count, self.dtype)
        return cos.to(self.device), sin.to(self.device)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        out_slots: torch.Tensor,
        *,
        caches: list[LayerCache],
        attention: AttentionBackend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K/V of every row, return logits of `rows`: see Decoder.

        returns   [S, vocab] in the model's type
        """
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        num_rows = len(token_ids)
        turned, width = heads + kv_heads, (heads + kv_heads) * dim
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        eps = config.rms_norm_eps
        hidden = embedding(token_ids, self._embedding)
        last = len(self._layers) - 1
        for number, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            qkv = layer.qkv(rms_norm(hidden, layer.attention_norm, eps))
            qk = qkv[:, :width].view(num_rows, turned, dim)
            if layer.qk_norm is not None:
                qk = rms_norm(qk, layer.qk_norm, eps)
            qk = rotate(qk, cos, sin)
            cache.k_slots.index_copy_(0, out_slots, qk[:, heads:])
            cache.v_slots.index_copy_(0, out_slots, qkv[:, width:].view(num_rows, kv_heads, dim))
            if number == last and rows is not None and not len(rows):
                # K/V of every layer are written and nobody asks for logits.
                return hidden.new_empty(0, config.vocab_size)
            mixed = attention.run(qk[:, :heads], cache.k, cache.v, number).view(num_rows, heads * dim)
            if number == last and rows is not None:
                # From here on rows no longer meet: carry only those that are wanted.
                mixed, hidden = mixed.index_select(0, rows), hidden.index_select(0, rows)
            hidden = layer.attention_out.add_to(hidden, mixed)
            gate, up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps)).chunk(2, dim=-1)
            hidden = layer.down.add_to(hidden, silu(gate).mul_(up))
        return self._lm_head(rms_norm(hidden, self._final_norm, eps))


def quantized_or_not(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    wide: bool = False,
    quantization: Quantization,
    fill: Fill | None = None,
) -> AnyLinear:
    """The layer of `weight` [out, in] in the wanted form. `fill`: see Linear."""
    if quantization == "none":
        return Linear(weight, bias, wide=wide, fill=fill)
    return QuantizedLinear(weight, bias, two_rows=quantization == "int8")


def _qk_norm(config: LlamaConfig, layer: LayerWeights) -> torch.Tensor | None:
    """Weights of the head norms for q and k heads together, [Hq + Hkv, D]; None where the model has none."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    q, k = layer.q_norm.expand(config.num_heads, -1), layer.k_norm.expand(config.num_kv_heads, -1)
    return torch.cat((q, k))
