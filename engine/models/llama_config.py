"""LlamaConfig. Owns: the shape of a Llama-family decoder as a value, and the checks that make it loadable."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.errors import ModelFormatError


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE frequencies are stretched beyond the trained context.

    kind    `linear` (all frequencies divided by `factor`), `llama3` (only those of long wavelength), `yarn` (by
            wavelength too, and q and k are scaled), `factors` (each frequency divided by its own of `factors`)
    beta_fast, beta_slow   yarn: turns within the original context above which a frequency stays, below which it is
                           stretched whole
    magnitude              yarn: cosine and sine are multiplied by it
    truncate               yarn: the bounds between the two are whole dimensions
    factors                one number for each of the D / 2 frequencies
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()

    def check(self, source: object, head_dim: int) -> None:
        """Raise ModelFormatError where the stretch is not defined."""
        if not 1 <= self.factor < float("inf"):
            raise ModelFormatError(f"{source}: RoPE scaling factor is {self.factor}; at least 1 is needed")
        if not self.low_freq_factor < self.high_freq_factor:
            raise ModelFormatError(
                f"{source}: high_freq_factor is {self.high_freq_factor}; more than low_freq_factor, "
                f"{self.low_freq_factor}, is needed"
            )
        _at_least(source, "original_max_position_embeddings", self.original_context, 1)
        if not 0 < self.beta_slow < self.beta_fast < float("inf"):
            raise ModelFormatError(
                f"{source}: beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; both above 0 and beta_fast "
                "the larger are needed"
            )
        if not 0 < self.magnitude < float("inf"):
            raise ModelFormatError(f"{source}: attention_factor is {self.magnitude}; a finite number above 0 is needed")
        if self.kind != "factors":
            return
        if len(self.factors) != head_dim // 2:
            raise ModelFormatError(
                f"{source}: {len(self.factors)} RoPE factors; head_dim {head_dim} needs {head_dim // 2}"
            )
        if bad := [f for f in self.factors if not 0 < f < float("inf")]:
            raise ModelFormatError(f"{source}: a RoPE factor is {bad[0]}; a finite number above 0 is needed")


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What yarn multiplies q and k by, for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Numbers of one Llama-family decoder. Sizes in elements, contexts in tokens.

    rope_theta      base of the rotary frequencies
    eos_token_ids   tokens that end an answer, the first one foremost
    tied_embeddings the LM head is the embedding table
    family          name of the architecture: llama, mistral, qwen2, qwen3
    qkv_bias, attention_out_bias, mlp_bias   these layers add a bias
    qk_norm         each head of q and k is normalised before it is turned
    windows         tokens that a row of each layer sees, itself included; 0: all before it; () for all layers: 0
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    rope_scaling: RopeScaling | None = None
    family: str = "llama"
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()

    def check(self, source: object) -> LlamaConfig:
        """Return self, or raise ModelFormatError naming `source`, the field, its value and the limit."""
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            _at_least(source, field, getattr(self, field), 1)
        _at_least(source, "max_context_tokens", self.max_context_tokens, 2)
        _at_least(source, "head_dim", self.head_dim, 2)
        if self.head_dim % 2:
            raise ModelFormatError(f"{source}: head_dim is {self.head_dim}; RoPE needs an even number")
        if self.num_heads % self.num_kv_heads:
            raise ModelFormatError(
                f"{source}: num_heads is {self.num_heads}, which is no multiple of num_kv_heads, {self.num_kv_heads}"
            )
        for field in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, field)
            if not 0 < value < float("inf"):
                raise ModelFormatError(f"{source}: {field} is {value}; a finite number above 0 is needed")
        if self.rope_scaling is not None:
            self.rope_scaling.check(source, self.head_dim)
            if self.rope_scaling.kind == "yarn" and self.rope_theta <= 1:
                raise ModelFormatError(f"{source}: rope_theta is {self.rope_theta}; yarn needs more than 1")
        if self.windows and len(self.windows) != self.num_layers:
            raise ModelFormatError(
                f"{source}: layer_types names {len(self.windows)} layers; num_layers is {self.num_layers}"
            )
        for window in self.windows:
            _at_least(source, "sliding_window", window, 0)
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token_id < self.vocab_size:
                raise ModelFormatError(
                    f"{source}: special token id {token_id} is outside the vocabulary of {self.vocab_size} tokens"
                )
        return self

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """K and V of one token in all layers, in bytes, for elements of `itemsize` bytes."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * itemsize


def _at_least(source: object, field: str, value: int, limit: int) -> None:
    if value < limit:
        raise ModelFormatError(f"{source}: {field} is {value}; at least {limit} is needed")
