"""GGUF loader. Owns: turning a GGUF file of a Llama-family decoder into a LlamaConfig and canonical weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from engine.errors import ModelFormatError
from engine.models.gguf_file import GgufFile
from engine.models.llama_config import LlamaConfig, RopeScaling, yarn_magnitude
from engine.models.weights import LayerWeights, LlamaWeights

#: Architecture -> whether the rows of q and k are stored interleaved. Mistral's files say `llama`.
_ARCHITECTURES: Final = {"llama": True, "qwen2": False, "qwen3": False}
_ROPE_FACTORS: Final = "rope_freqs.weight"
#: Keys whose other values change the arithmetic, with the only value that is computed here.
_FIXED: Final = {"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_log_multiplier": 0.0, "attention.scale": 0.0}
_MOST_CONTEXT: Final = 2**31 - 1


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[LlamaConfig, LlamaWeights]:
    """Read configuration and weights; raises ModelFormatError on anything malformed or not supported."""
    with GgufFile(path) as file:
        config = read_config(file)
        return config, _Reader(file, config, dtype).weights()


def read_config(file: GgufFile) -> LlamaConfig:
    """The configuration in the metadata of `file`, checked."""
    arch = file.get("general.architecture", str)
    if arch not in _ARCHITECTURES:
        known = ", ".join(map(repr, _ARCHITECTURES))
        raise ModelFormatError(f"{file.path}: general.architecture is {arch!r:.80}; supported are {known}")
    hidden, heads = file.get(f"{arch}.embedding_length", int), file.get(f"{arch}.attention.head_count", int)
    if heads < 1 or hidden < 1:
        raise ModelFormatError(f"{file.path}: embedding_length {hidden} and head_count {heads} must be at least 1")
    head_dim = file.get(f"{arch}.attention.key_length", int, hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := file.get(f"{arch}.{name}", int, head_dim)) != head_dim:
            raise ModelFormatError(
                f"{file.path}: {arch}.{name} is {size}; only the key length, {head_dim}, is supported"
            )
    for name, only in _FIXED.items():
        if (value := file.get(f"{arch}.{name}", float, only)) != only:
            raise ModelFormatError(f"{file.path}: {arch}.{name} is {value}; {only} is supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFormatError(f"{file.path}: tensor token_embd.weight is missing")
    layers, context = file.get(f"{arch}.block_count", int), file.get(f"{arch}.context_length", int)
    scaling = _rope_scaling(file, arch, head_dim, context)
    if scaling is not None and scaling.kind == "yarn":
        context = max(context, int(min(scaling.original_context * scaling.factor, _MOST_CONTEXT)))
    return LlamaConfig(
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=file.get(f"{arch}.feed_forward_length", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=file.get(f"{arch}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_context_tokens=context,
        rope_theta=float(file.get(f"{arch}.rope.freq_base", float, 10000.0)),
        rms_norm_eps=float(file.get(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        tied_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int, None),
        eos_token_ids=_eos_token_ids(file),
        rope_scaling=scaling,
        family=arch,
        # The tensors themselves say which layers have a bias; one that is half there is missing its other half.
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        attention_out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=arch == "qwen3",
        windows=_windows(file, arch, layers),
    ).check(file.path)


def _windows(file: GgufFile, arch: str, layers: int) -> tuple[int, ...]:
    """Every layer has the window that the file names, or none has one."""
    window = file.get(f"{arch}.attention.sliding_window", int, 0)
    if not window:
        return ()
    pattern = f"{arch}.attention.sliding_window_pattern"
    if pattern in file.metadata:
        raise ModelFormatError(f"{file.path}: {pattern} is present; one window for all layers is supported")
    if not 0 <= layers <= len(file.tensors):
        raise ModelFormatError(f"{file.path}: num_layers is {layers}; the file has {len(file.tensors)} tensors")
    return (window,) * layers


def _rope_scaling(file: GgufFile, arch: str, head_dim: int, context: int) -> RopeScaling | None:
    """How the file stretches RoPE: by its metadata, or by a tensor of factors, which is how llama3 is written down."""
    prefix = f"{arch}.rope.scaling"
    kind = file.get(f"{prefix}.type", str, "none")
    if kind not in ("none", "linear", "yarn"):
        raise ModelFormatError(f"{file.path}: {prefix}.type is {kind!r:.80}; 'none', 'linear' and 'yarn' are supported")
    if _ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ModelFormatError(f"{file.path}: {prefix}.type is {kind!r} beside {_ROPE_FACTORS}; one is supported")
        factors = file.dequantize(_ROPE_FACTORS, (head_dim // 2,))
        return RopeScaling(kind="factors", factor=1.0, factors=tuple(factors.tolist()))
    if kind == "none":
        return None
    factor = float(file.get(f"{prefix}.factor", float))
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if not 1 <= factor < float("inf"):
        raise ModelFormatError(f"{file.path}: {prefix}.factor is {factor}; at least 1 is needed")
    weight = 1.0
    for name in ("attn_factor", "yarn_attn_factor"):
        weight *= float(file.get(f"{prefix}.{name}", float, 1.0))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=file.get(f"{prefix}.original_context_length", int, context),
        beta_fast=float(file.get(f"{prefix}.yarn_beta_fast", float, 32.0)),
        beta_slow=float(file.get(f"{prefix}.yarn_beta_slow", float, 1.0)),
        magnitude=weight * yarn_magnitude(factor),
    )


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """End of sequence, then end of turn and end of message where the file names them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (file.get(f"tokenizer.ggml.{key}", int, None) for key in keys)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


class _Reader:
    """Reads the tensors of one file, and knows which it has read."""

    def __init__(self, file: GgufFile, config: LlamaConfig, dtype: torch.dtype) -> None:
        self._file = file
        self._config = config
        self._dtype = dtype
        self._interleaved = _ARCHITECTURES[config.family]
        self._seen: set[str] = {_ROPE_FACTORS}

    def weights(self) -> LlamaWeights:
        """Everything; raises ModelFormatError for a tensor that is missing, malformed or not asked for."""
        config = self._config
        layers = [self._layer(f"blk.{i}") for i in range(config.num_layers)]
        embedding = self._take("token_embd.weight", config.vocab_size, config.hidden_size)
        weights = LlamaWeights(
            embedding=embedding,
            layers=layers,
            final_norm=self._take("output_norm.weight", config.hidden_size),
            lm_head=embedding
            if config.tied_embeddings
            else self._take("output.weight", config.vocab_size, config.hidden_size),
        )
        if unknown := sorted(set(self._file.tensors) - self._seen):
            raise ModelFormatError(
                f"{self._file.path}: tensor {unknown[0]} has no place in a {config.family} model ({len(unknown)} such)"
            )
        return weights

    def _take(self, name: str, *shape: int, heads: int = 0) -> torch.Tensor:
        """Tensor `name` of `shape`; with `heads` its rows are those of so many heads, in the order of this format."""
        self._seen.add(name)
        rows = self._file.dequantize(name, shape)
        if heads and self._interleaved:
            rows = unpermute_rows(rows.reshape(shape[0], -1), heads).reshape(shape)
        return torch.from_numpy(rows).to(self._dtype)

    def _layer(self, p: str) -> LayerWeights:
        config, take = self._config, self._take
        hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads

        def qkv(kind: str, *columns: int) -> torch.Tensor:
            q = take(f"{p}.attn_q.{kind}", heads * dim, *columns, heads=heads)
            k = take(f"{p}.attn_k.{kind}", kv_heads * dim, *columns, heads=kv_heads)
            return torch.cat((q, k, take(f"{p}.attn_v.{kind}", kv_heads * dim, *columns)))

        def gate_up(kind: str, *columns: int) -> torch.Tensor:
            return torch.cat([take(f"{p}.ffn_{name}.{kind}", ffn, *columns) for name in ("gate", "up")])

        def optional(is_there: bool, make: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor | None:
            return make(*arguments) if is_there else None

        return LayerWeights(
            attention_norm=take(f"{p}.attn_norm.weight", hidden),
            qkv=qkv("weight", hidden),
            attention_out=take(f"{p}.attn_output.weight", hidden, heads * dim),
            mlp_norm=take(f"{p}.ffn_norm.weight", hidden),
            gate_up=gate_up("weight", hidden),
            down=take(f"{p}.ffn_down.weight", hidden, ffn),
            qkv_bias=optional(config.qkv_bias, qkv, "bias"),
            attention_out_bias=optional(config.attention_out_bias, take, f"{p}.attn_output.bias", hidden),
            gate_up_bias=optional(config.mlp_bias, gate_up, "bias"),
            down_bias=optional(config.mlp_bias, take, f"{p}.ffn_down.bias", hidden),
            q_norm=optional(config.qk_norm, take, f"{p}.attn_q_norm.weight", dim),
            k_norm=optional(config.qk_norm, take, f"{p}.attn_k_norm.weight", dim),
        )


def unpermute_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order that GGUF gives q and k of `llama` models.

    There the two halves of a head are interleaved (0, D/2, 1, D/2 + 1, …) so that RoPE can turn neighbours; rotate-half
    RoPE wants the first halves together. rows [heads * D, columns] -> same shape.
    """
    total, columns = rows.shape
    return np.ascontiguousarray(rows.reshape(heads, total // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows.shape))
