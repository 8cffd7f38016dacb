"""NativeLlama. Owns: the same decoder as engine.models.llama, on the kernels in C.

What is one step here is one operation between two places in memory; engine.models.llama says what each means, and is
what this is tested against. Activations and K/V are in the library's type (bfloat16 or float32), sums, norms, rotation
and logits float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import embedding

from engine.attention.base import AttentionBackend
from engine.models.decoder import LayerCache
from engine.models.llama_config import LlamaConfig
from engine.models.native_linear import Int8Linear, NativeLinear, Norm, Passage, PlainLinear, Scratch, input_step
from engine.models.quantized import Quantization
from engine.models.rope import rope_tables
from engine.models.weights import LayerWeights, LlamaWeights
from engine.native.library import ADD_TO_NUMBERS, MOST_DIM, SILU_TO_NUMBERS, TO_FLOAT, TO_NUMBERS, Heads, Library

#: Half a head is turned 16 numbers at a time.
_HEAD_STEP: Final = 32


@dataclass(slots=True)
class _Layer:
    attention_norm: Norm
    qkv: NativeLinear
    attention_out: NativeLinear
    mlp_norm: Norm
    gate_up: NativeLinear
    down: NativeLinear
    #: [Hq + Hkv, D] float32
    head_norm: torch.Tensor | None


def misfit(config: LlamaConfig, quantization: Quantization) -> str | None:
    """Why the kernels cannot run a model of this shape; None: they can."""
    if quantization == "int8-fast":
        return "executor.quantization=int8-fast"
    step = input_step(quantization)
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention width": config.num_heads * config.head_dim,
    }
    for name, width in widths.items():
        if width % step:
            return f"{name} {width} is no multiple of {step}"
    if config.head_dim % _HEAD_STEP:
        return f"head_dim {config.head_dim} is no multiple of {_HEAD_STEP}"
    if config.head_dim > MOST_DIM:
        return f"head_dim {config.head_dim} is above {MOST_DIM}"
    return None


class NativeLlama:
    """A decoder ready to run. Same calls as LlamaModel; `misfit` says which models it takes."""

    def __init__(
        self, config: LlamaConfig, weights: LlamaWeights, library: Library, *, quantization: Quantization = "none"
    ) -> None:
        """Takes `weights`, of the library's type, apart: a matrix is dropped once it is in its final layout."""
        linear = PlainLinear if quantization == "none" else Int8Linear
        self.config = config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.quantization = quantization
        self.kernels = "kernels in C" if library.has_tiles else "kernels in C, no matrix units"
        self._library, self._scratch = library, Scratch()
        self._embedding = weights.embedding
        #: Inputs of the widest layer.
        self._widest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        eps = config.rms_norm_eps
        self._final_norm = Norm(weights.final_norm, eps)
        self._lm_head: NativeLinear = linear(library, weights.lm_head)
        self._layers: list[_Layer] = []
        weights.layers.reverse()
        while weights.layers:
            layer = weights.layers.pop()
            self._layers.append(
                _Layer(
                    attention_norm=Norm(layer.attention_norm, eps),
                    qkv=linear(library, layer.qkv, layer.qkv_bias),
                    attention_out=linear(library, layer.attention_out, layer.attention_out_bias),
                    mlp_norm=Norm(layer.mlp_norm, eps),
                    gate_up=linear(library, layer.gate_up, layer.gate_up_bias, gated=True),
                    down=linear(library, layer.down, layer.down_bias),
                    head_norm=_head_norm(config, layer),
                )
            )
        self._cos, self._sin = self._rope_tables(0)

    def reserve_positions(self, count: int) -> None:
        """Make positions below `count` usable."""
        if count > len(self._cos):
            self._cos, self._sin = self._rope_tables(count)

    def _rope_tables(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each [count, D / 2] float32."""
        cos, sin = rope_tables(self.config, count, torch.float32)
        half = self.config.head_dim // 2
        # The second half of the sine is the one that keeps its sign.
        return cos[:, 0, :half].contiguous(), sin[:, 0, half:].contiguous()

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

        returns   [S, vocab] float32
        """
        config, scratch = self.config, self._scratch
        heads, dim = config.num_heads, config.head_dim
        count, width = len(token_ids), heads * dim
        passage = Passage(scratch, count, self._widest, self.dtype)
        hidden = embedding(token_ids, self._embedding)
        hidden_at = hidden.data_ptr()
        qkv = scratch.rows("qkv", count, width + 2 * config.num_kv_heads * dim, self.dtype)
        qkv_at, q = qkv.data_ptr(), qkv[:, :width].view(count, heads, dim)
        between = scratch.rows("between", count, config.intermediate_size, self.dtype).data_ptr()
        # Kernels take one number after the other, whatever steps a caller's view makes.
        positions, out_slots = positions.contiguous(), out_slots.contiguous()
        turn = self._turning(qkv, positions, out_slots)
        turned = ctypes.byref(turn)
        last = len(self._layers) - 1
        for number, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            layer.qkv(passage, hidden_at, qkv_at, TO_NUMBERS, layer.attention_norm)
            turn.k_slots, turn.v_slots = cache.k_slots.data_ptr(), cache.v_slots.data_ptr()
            if layer.head_norm is not None:
                turn.head_norm = layer.head_norm.data_ptr()
            self._library.rotate_and_store(turned)
            if number == last and rows is not None and not len(rows):
                # K/V of every layer are written and nobody asks for logits.
                return torch.empty(0, config.vocab_size)
            mixed = attention.run(q, cache.k, cache.v, number)
            if number == last and rows is not None:
                # From here on rows no longer meet: carry only those that are wanted.
                mixed, hidden = mixed.index_select(0, rows), hidden.index_select(0, rows)
                hidden_at, passage = hidden.data_ptr(), Passage(scratch, len(rows), self._widest, self.dtype)
                # A row may be wanted more than once: there can be more of them than there were.
                between = scratch.rows("between", len(rows), config.intermediate_size, self.dtype).data_ptr()
            layer.attention_out(passage, mixed.data_ptr(), hidden_at, ADD_TO_NUMBERS)
            layer.gate_up(passage, hidden_at, between, SILU_TO_NUMBERS, layer.mlp_norm)
            layer.down(passage, between, hidden_at, ADD_TO_NUMBERS)
        # New memory: an executor may hand logits on while the next step is computed.
        logits = torch.empty(len(hidden), config.vocab_size)
        self._lm_head(passage, hidden_at, logits.data_ptr(), TO_FLOAT, self._final_norm)
        return logits

    def _turning(self, qkv: torch.Tensor, positions: torch.Tensor, out_slots: torch.Tensor) -> Heads:
        """What `rotate_and_store` needs of this batch, but for its layer."""
        config = self.config
        return Heads(
            qkv=qkv.data_ptr(),
            slots=out_slots.data_ptr(),
            positions=positions.data_ptr(),
            cos=self._cos.data_ptr(),
            sin=self._sin.data_ptr(),
            rows=len(qkv),
            q_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            eps=config.rms_norm_eps,
            threads=torch.get_num_threads(),
        )


def _head_norm(config: LlamaConfig, layer: LayerWeights) -> torch.Tensor | None:
    """Weights of the head norms for q and k heads together, [Hq + Hkv, D] float32; None where the model has none."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    q, k = layer.q_norm.expand(config.num_heads, -1), layer.k_norm.expand(config.num_kv_heads, -1)
    return torch.cat((q, k)).float().contiguous()
