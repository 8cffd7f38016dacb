"""Small GGUF files. Owns: writing a tiny llama with the `gguf` package, as a converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 96, 2, 4, 2, 320
DIM = HIDDEN // HEADS


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rotate-half rows -> the order of GGUF llama files, row by row: new row 2i is old i, 2i + 1 is old D/2 + i."""
    dim = rows.shape[0] // heads
    source = [h * dim + r // 2 + (r % 2) * (dim // 2) for h in range(heads) for r in range(dim)]
    return rows[source]


def tiny_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights under GGUF names, q and k in rotate-half order."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 0.2).astype(np.float32)

    weights = {"token_embd.weight": matrix(VOCAB, HIDDEN), "output_norm.weight": np.ones(HIDDEN, dtype=np.float32)}
    for i in range(LAYERS):
        weights |= {
            f"blk.{i}.attn_norm.weight": 1 + matrix(1, HIDDEN)[0],
            f"blk.{i}.attn_q.weight": matrix(HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": matrix(KV_HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": matrix(KV_HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": matrix(HIDDEN, HEADS * DIM),
            f"blk.{i}.ffn_norm.weight": 1 + matrix(1, HIDDEN)[0],
            f"blk.{i}.ffn_gate.weight": matrix(FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": matrix(FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": matrix(HIDDEN, FFN),
        }
    return weights


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    kind: Kind = Kind.F32,
    arch: str = "llama",
    drop_keys: tuple[str, ...] = (),
    **facts: Any,
) -> Path:
    """Write `weights` (matrices as `kind`, vectors as F32). `facts` override metadata of the architecture."""
    writer = gguf.GGUFWriter(path, arch)
    numbers: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    floats = {"rope.freq_base": 10000.0, "attention.layer_norm_rms_epsilon": 1e-5}
    for key, value in (numbers | floats | facts).items():
        if key in drop_keys:
            continue
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        else:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    for name, array in weights.items():
        stored = array
        if name.endswith("attn_q.weight"):
            stored = interleaved(array, HEADS)
        if name.endswith("attn_k.weight"):
            stored = interleaved(array, KV_HEADS)
        if array.ndim == 1 or kind is Kind.F32:
            writer.add_tensor(name, np.ascontiguousarray(stored))
        else:
            writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: Part of a transformers tensor name -> the same in GGUF files.
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_of(model: Any, path: Path, **facts: Any) -> Path:
    """A transformers model as a converter would write it, float32. `facts` are metadata beside the sizes."""
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in (numbers | facts).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{arch}.{key}", value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = interleaved(array, heads)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(array))
    if config.rope_parameters["rope_type"] == "llama3":
        # What converters do: the frequencies unstretched, over the stretched ones.
        plain = 1.0 / config.rope_parameters["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
        factors = plain / model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, kind = name.rsplit(".", 1)
    if module in whole:
        return f"{whole[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"
