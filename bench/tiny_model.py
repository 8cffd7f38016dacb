"""A real model of 60 KB. Owns: making a Llama folder with a byte-level tokenizer, for loads of the server itself.

It is computed like every other model: real weights, attention and K/V pages. Its words make no sense.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

HIDDEN: Final = 32
FFN: Final = 48
LAYERS: Final = 2
HEADS: Final = 4
KV_HEADS: Final = 2
CONTEXT: Final = 1024
_SPECIAL: Final = ("<s>", "</s>")


def write_tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """Write config, weights and tokenizer into `folder`, which is made; the same bytes for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(folder)
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(vocabulary, seed), folder / "model.safetensors")
    return folder


def _write_tokenizer(folder: Path) -> int:
    """One token per byte, and two special ones. Returns the size of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    return len(vocabulary)


def _weights(vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = HIDDEN // HEADS * KV_HEADS

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 0.3

    weights = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(width, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(width, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{layer}.mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(FFN, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, FFN),
            f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return weights
