"""LlamaModel. Owns: the arithmetic of a Llama-family decoder over one flattened batch; knows no request and no page.

Everything that does not depend on the batch is prepared once: fused matrices, their layouts, the rotary tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import embedding

from engine.attention.base import AttentionBackend
from engine.models.decoder import LayerCache
from engine.models.linear import Fill, Linear
from engine.models.llama_config import LlamaConfig
from engine.models.ops import HeadNorms, MakeOps, TorchOps
from engine.models.quantized import Quantization, QuantizedLinear
from engine.models.weights import LayerWeights, LlamaWeights

AnyLinear = Linear | QuantizedLinear


@dataclass(slots=True)
class _Layer:
    """next_norm: of what this layer leaves: the next layer's first one, or the final one."""

    qkv: AnyLinear
    head_norms: HeadNorms | None
    attention_out: AnyLinear
    mlp_norm: torch.Tensor
    gate_up: AnyLinear
    down: AnyLinear
    next_norm: torch.Tensor


class LlamaModel:
    """A decoder ready to run where its weights are. `config` holds its facts (RoPE, end tokens, context)."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        *,
        quantization: Quantization = "none",
        make_ops: MakeOps = TorchOps,
    ) -> None:
        """Takes `weights` apart: each matrix is dropped as soon as it is in its final layout.

        make_ops   makes the table of small operators
        """
        linear = partial(quantized_or_not, quantization=quantization, fill=Fill())
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._embedding = weights.embedding
        self.quantization = quantization
        self._ops = make_ops(config, weights.embedding)
        self.kernels = self._ops.kernels
        self._first_norm = weights.layers[0].attention_norm
        self._lm_head = linear(weights.lm_head)
        self._layers: list[_Layer] = []
        weights.layers.reverse()
        while weights.layers:
            layer = weights.layers.pop()
            self._layers.append(
                _Layer(
                    qkv=linear(layer.qkv, layer.qkv_bias),
                    head_norms=_head_norms(config, layer),
                    attention_out=linear(layer.attention_out, layer.attention_out_bias),
                    mlp_norm=layer.mlp_norm,
                    gate_up=linear(layer.gate_up, layer.gate_up_bias),
                    down=linear(layer.down, layer.down_bias),
                    next_norm=weights.layers[-1].attention_norm if weights.layers else weights.final_norm,
                )
            )

    def reserve_positions(self, count: int) -> None:
        """Make positions below `count` usable. Left to the executor: its pool may hold far less than the context."""
        self._ops.reserve_positions(count)

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
        config, ops = self.config, self._ops
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        num_rows, width = len(token_ids), (heads + kv_heads) * dim
        angles = ops.angles(positions)
        hidden = embedding(token_ids, self._embedding)
        normed = ops.rms_norm(hidden, self._first_norm)
        last = len(self._layers) - 1
        for number, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            qkv = layer.qkv(normed)
            q, k = ops.turned(qkv, layer.head_norms, angles)
            cache.k_slots.index_copy_(0, out_slots, k)
            cache.v_slots.index_copy_(0, out_slots, qkv[:, width:].view(num_rows, kv_heads, dim))
            if number == last and rows is not None and not len(rows):
                # K/V of every layer are written and nobody asks for logits.
                return hidden.new_empty(0, config.vocab_size)
            mixed = attention.run(q, cache.k, cache.v, number).view(num_rows, heads * dim)
            if number == last and rows is not None:
                # From here on rows no longer meet: carry only those that are wanted.
                mixed, hidden = mixed.index_select(0, rows), hidden.index_select(0, rows)
            hidden, normed = ops.add_norm(hidden, layer.attention_out, mixed, layer.mlp_norm)
            between = ops.silu_and_mul(layer.gate_up(normed))
            hidden, normed = ops.add_norm(hidden, layer.down, between, layer.next_norm)
        return self._lm_head(normed)


def quantized_or_not(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    quantization: Quantization,
    fill: Fill | None = None,
) -> AnyLinear:
    """The layer of `weight` [out, in] in the wanted form. `fill`: see Linear."""
    if quantization == "none":
        return Linear(weight, bias, fill=fill)
    return QuantizedLinear(weight, bias, two_rows=quantization == "int8")


def _head_norms(config: LlamaConfig, layer: LayerWeights) -> HeadNorms | None:
    """None where the model has none."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    q, k = layer.q_norm.expand(config.num_heads, -1), layer.k_norm.expand(config.num_kv_heads, -1)
    return HeadNorms(layer.q_norm, layer.k_norm, torch.cat((q, k)))
