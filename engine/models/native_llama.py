"""NativeLlama. Owns: the same decoder as engine.models.llama, on the kernels in C.

The layers run in one call, without the interpreter: kernels/forward.c strings them together. engine.models.llama says
what each operation means, and is what this is tested against. Activations and K/V are in the library's type (bfloat16
or float32), sums, norms, rotation and logits float32.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch.nn.functional import embedding

from engine.attention.base import AttentionBackend
from engine.attention.native import NativeBackend, distinct_windows
from engine.models.decoder import LayerCache
from engine.models.llama_config import LlamaConfig
from engine.models.native_linear import Int8Linear, NativeLinear, Norm, Passage, PlainLinear, Scratch, input_step
from engine.models.quantized import Quantization
from engine.models.rope import rope_tables
from engine.models.weights import LayerWeights, LlamaWeights
from engine.native.library import MOST_DIM, TO_FLOAT, Forward, Heads, Layer, Library

#: Half a head is turned 16 numbers at a time.
_HEAD_STEP: Final = 32


@dataclass(slots=True)
class _Layer:
    """One layer's weights, which the kernels know by pointers.

    head_norm   [Hq + Hkv, D] float32
    """

    attention_norm: Norm
    qkv: NativeLinear
    attention_out: NativeLinear
    mlp_norm: Norm
    gate_up: NativeLinear
    down: NativeLinear
    head_norm: torch.Tensor | None

    def form(self, window: int) -> Layer:
        """For the kernels. `window`: the index of its own among those of the model."""
        return Layer(
            attention_norm=self.attention_norm.form,
            mlp_norm=self.mlp_norm.form,
            qkv=self.qkv.form,
            attention_out=self.attention_out.form,
            gate_up=self.gate_up.form,
            down=self.down.form,
            head_norm=None if self.head_norm is None else self.head_norm.data_ptr(),
            window=window,
        )


@dataclass(slots=True)
class _Batch:
    """Rows on their way through the layers. `form`: for the kernels. `memory`: what else its pointers lead to."""

    hidden: torch.Tensor
    passage: Passage
    form: Forward
    memory: tuple[object, ...]


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
        self.kernels = "kernels in C" if library.has_tiles else "kernels in C, without AMX"
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
        windows = distinct_windows(config.windows)
        numbers = [windows.index(window) for window in config.windows] or [0] * len(self._layers)
        #: The layers as the kernels know them.
        self._forms = (Layer * len(self._layers))(
            *(layer.form(number) for layer, number in zip(self._layers, numbers, strict=True))
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
        config, kernels = self.config, self._library
        heads, dim = config.num_heads, config.head_dim
        count, width, last = len(token_ids), heads * dim, len(self._layers) - 1
        qkv = self._scratch.rows("qkv", count, width + 2 * config.num_kv_heads * dim, self.dtype)
        q = qkv[:, :width].view(count, heads, dim)
        # Kernels take one number after the other, whatever steps a caller's view makes.
        positions, out_slots = positions.contiguous(), out_slots.contiguous()
        turn = self._turning(qkv, positions, out_slots)
        mixed = self._scratch.rows("mixed", count, width, self.dtype)
        batch = self._batch(embedding(token_ids, self._embedding), mixed, turn)
        self._find(caches)
        forward = ctypes.byref(batch.form)
        is_within = isinstance(attention, NativeBackend) and attention.runs_within
        if is_within:
            calls = cast("NativeBackend", attention).calls(q, mixed.view(q.shape), config.num_kv_heads)
            batch.form.attention = ctypes.addressof(calls)
            kernels.run_layers(forward, last)
        for number in range(last if is_within else 0, last + 1):
            kernels.begin_layer(forward, number)
            if number == last and rows is not None and not len(rows):
                # K/V of every layer are written and nobody asks for logits.
                return torch.empty(0, config.vocab_size)
            if is_within:
                kernels.attend_layer(forward, number)
            else:
                mixed.copy_(attention.run(q, caches[number].k, caches[number].v, number).view(mixed.shape))
            if number == last and rows is not None:
                # From here on rows no longer meet: carry only those that are wanted.
                batch = self._batch(batch.hidden.index_select(0, rows), mixed.index_select(0, rows), turn)
                forward = ctypes.byref(batch.form)
            kernels.finish_layer(forward, number)
        # New memory: an executor may hand logits on while the next step is computed.
        logits = torch.empty(len(batch.hidden), config.vocab_size)
        self._lm_head(batch.passage, batch.hidden.data_ptr(), logits.data_ptr(), TO_FLOAT, self._final_norm)
        return logits

    def _batch(self, hidden: torch.Tensor, mixed: torch.Tensor, turn: Heads) -> _Batch:
        """What the kernels need of as many rows as `hidden` [R, hidden size] and `mixed` [R, Hq * D] have."""
        passage = Passage(self._scratch, len(hidden), self._widest, self.dtype)
        between = self._scratch.rows("between", len(hidden), self.config.intermediate_size, self.dtype)
        form = Forward(
            passage=passage.form,
            layers=ctypes.addressof(self._forms),
            heads=ctypes.addressof(turn),
            hidden=hidden.data_ptr(),
            mixed=mixed.data_ptr(),
            between=between.data_ptr(),
        )
        return _Batch(hidden, passage, form, (mixed, between, turn))

    def _find(self, caches: list[LayerCache]) -> None:
        """Where each layer has its K/V: looked up again when an executor comes with other memory."""
        # Both ends: new memory of another size may begin where the old one began.
        first, last = caches[0].k.data_ptr(), caches[-1].v.data_ptr()
        if (first, last) == (self._forms[0].k, self._forms[-1].v):
            return
        for form, cache in zip(self._forms, caches, strict=True):
            form.k, form.v = cache.k_slots.data_ptr(), cache.v_slots.data_ptr()

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
