"""GGUF loader. Owns: turning a GGUF file of architecture `llama` into a LlamaConfig and canonical weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from engine.errors import ModelFormatError
from engine.models.gguf_file import GgufFile
from engine.models.llama_config import LlamaConfig
from engine.models.weights import LayerWeights, LlamaWeights

#: Known to exist in such files and derived from the configuration here instead.
_DERIVED = frozenset({"rope_freqs.weight"})


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[LlamaConfig, LlamaWeights]:
    """Read configuration and weights; raises ModelFormatError on anything malformed or not supported."""
    with GgufFile(path) as file:
        config = read_config(file)
        return config, _read_weights(file, config, dtype)


def read_config(file: GgufFile) -> LlamaConfig:
    """The configuration in the metadata of `file`, checked."""
    arch = file.get("general.architecture", str)
    if arch != "llama":
        raise ModelFormatError(f"{file.path}: general.architecture is {arch!r}; 'llama' is supported")
    hidden, heads = file.get("llama.embedding_length", int), file.get("llama.attention.head_count", int)
    if heads < 1 or hidden < 1:
        raise ModelFormatError(f"{file.path}: embedding_length {hidden} and head_count {heads} must be at least 1")
    head_dim = file.get("llama.attention.key_length", int, hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (size := file.get(key, int, head_dim)) != head_dim:
            raise ModelFormatError(f"{file.path}: {key} is {size}; only the key length, {head_dim}, is supported")
    scaling = file.get("llama.rope.scaling.type", str, "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        kind = scaling if scaling != "none" else "rope_freqs.weight"
        raise ModelFormatError(f"{file.path}: RoPE scaling {kind!r} in GGUF files is not supported; 'none' is")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFormatError(f"{file.path}: tensor token_embd.weight is missing")
    return LlamaConfig(
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=file.get("llama.feed_forward_length", int),
        num_layers=file.get("llama.block_count", int),
        num_heads=heads,
        num_kv_heads=file.get("llama.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_context_tokens=file.get("llama.context_length", int),
        rope_theta=float(file.get("llama.rope.freq_base", float, 10000.0)),
        rms_norm_eps=float(file.get("llama.attention.layer_norm_rms_epsilon", float)),
        tied_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.get("tokenizer.ggml.bos_token_id", int, None),
        eos_token_ids=_eos_token_ids(file),
    ).check(file.path)


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """End of sequence, then end of turn and end of message where the file names them."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = (file.get(f"tokenizer.ggml.{key}", int, None) for key in keys)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def _read_weights(file: GgufFile, config: LlamaConfig, dtype: torch.dtype) -> LlamaWeights:
    seen: set[str] = set(_DERIVED)

    def take(name: str, *shape: int) -> torch.Tensor:
        seen.add(name)
        return torch.from_numpy(file.dequantize(name, shape)).to(dtype)

    def take_rotary(name: str, heads: int) -> torch.Tensor:
        seen.add(name)
        rows = file.dequantize(name, (heads * config.head_dim, config.hidden_size))
        return torch.from_numpy(unpermute_rows(rows, heads)).to(dtype)

    hidden, ffn, kv_width = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    layers = []
    for i in range(config.num_layers):
        p = f"blk.{i}"
        q = take_rotary(f"{p}.attn_q.weight", config.num_heads)
        k = take_rotary(f"{p}.attn_k.weight", config.num_kv_heads)
        layers.append(
            LayerWeights(
                attention_norm=take(f"{p}.attn_norm.weight", hidden),
                qkv=torch.cat((q, k, take(f"{p}.attn_v.weight", kv_width, hidden))),
                attention_out=take(f"{p}.attn_output.weight", hidden, config.num_heads * config.head_dim),
                mlp_norm=take(f"{p}.ffn_norm.weight", hidden),
                gate_up=torch.cat((take(f"{p}.ffn_gate.weight", ffn, hidden), take(f"{p}.ffn_up.weight", ffn, hidden))),
                down=take(f"{p}.ffn_down.weight", hidden, ffn),
            )
        )
    embedding = take("token_embd.weight", config.vocab_size, hidden)
    weights = LlamaWeights(
        embedding=embedding,
        layers=layers,
        final_norm=take("output_norm.weight", hidden),
        lm_head=embedding if config.tied_embeddings else take("output.weight", config.vocab_size, hidden),
    )
    if unknown := sorted(set(file.tensors) - seen):
        raise ModelFormatError(f"{file.path}: tensor {unknown[0]} has no place in a llama model ({len(unknown)} such)")
    return weights


def unpermute_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the row order that GGUF gives q and k of `llama` models.

    There the two halves of a head are interleaved (0, D/2, 1, D/2 + 1, …) so that RoPE can turn neighbours; rotate-half
    RoPE wants the first halves together. rows [heads * D, columns] -> same shape.
    """
    total, columns = rows.shape
    return np.ascontiguousarray(rows.reshape(heads, total // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows.shape))
