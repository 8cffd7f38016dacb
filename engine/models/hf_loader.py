"""Hugging Face loader. Owns: turning a folder of config.json and *.safetensors into a LlamaConfig and weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch

from engine.errors import ModelFormatError
from engine.models.hf_config import read_config
from engine.models.json_file import read_json_object
from engine.models.llama_config import LlamaConfig
from engine.models.weights import LayerWeights, LlamaWeights

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


def load_hf_folder(folder: Path, dtype: torch.dtype) -> tuple[LlamaConfig, LlamaWeights]:
    """Read configuration and weights; raises ModelFormatError on anything malformed or not supported."""
    config = read_config(folder)
    with _Tensors(folder) as tensors:
        return config, _read_weights(tensors, config, dtype)


class _Tensors:
    """The tensors of a folder, one file or many, each read when it is asked for. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._where = self._locate()
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}
        self._seen: set[str] = set()

    def __enter__(self) -> _Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Tensor `name` of `shape` as `dtype`."""
        from safetensors import SafetensorError

        path = self._where.get(name)
        if path is None:
            raise ModelFormatError(f"{self._folder}: tensor {name} is missing")
        try:
            tensor: torch.Tensor = self._handle(path).get_tensor(name)
        except SafetensorError as error:
            raise ModelFormatError(f"{path}: tensor {name} cannot be read: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelFormatError(f"{path}: tensor {name} has shape {tuple(tensor.shape)}; {shape} is needed")
        if tensor.dtype not in _FLOATS:
            raise ModelFormatError(f"{path}: tensor {name} is {tensor.dtype}; float32, float16, bfloat16 are supported")
        self._seen.add(name)
        return tensor.to(dtype)

    def check_all_used(self, ignored: set[str], family: str) -> None:
        """A tensor that nothing asked for would change the answers, silently: refuse it."""
        # Older files store the rotary frequencies, which follow from the configuration.
        unused = {n for n in self._where if not n.endswith("rotary_emb.inv_freq")} - self._seen - ignored
        if unused:
            raise ModelFormatError(
                f"{self._folder}: tensor {min(unused)} has no place in a {family} model ({len(unused)} such)"
            )

    def _handle(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if path not in self._handles:
            try:
                self._handles[path] = self._open.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelFormatError(f"{path}: cannot be read as a safetensors file: {error}") from error
        return self._handles[path]

    def _locate(self) -> dict[str, Path]:
        """Tensor name -> file."""
        index = self._folder / _INDEX
        if not index.exists():
            single = self._folder / _SINGLE
            if not single.exists():
                raise ModelFormatError(f"{self._folder}: holds neither {_SINGLE} nor {_INDEX}")
            return dict.fromkeys(_names(single), single)
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelFormatError(f"{index}: weight_map is {weight_map!r:.80}; an object is needed")
        where = {}
        for name, file in weight_map.items():
            # The index is data: it may not lead out of the folder.
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelFormatError(
                    f"{index}: weight_map[{name!r:.80}] is {file!r:.80}; a plain file name is needed"
                )
            if not _is_file(self._folder / file):
                raise ModelFormatError(
                    f"{index}: weight_map[{name!r:.80}] is {file!r:.80}, which the folder does not hold"
                )
            where[name] = self._folder / file
        return where


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or none at all
        return False


def _names(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(f"{path}: cannot be read as a safetensors file: {error}") from error


def _read_weights(tensors: _Tensors, config: LlamaConfig, dtype: torch.dtype) -> LlamaWeights:
    hidden = config.hidden_size

    def take(name: str, *shape: int) -> torch.Tensor:
        return tensors.take(name, shape, dtype)

    layers = [_read_layer(take, config, f"model.layers.{i}") for i in range(config.num_layers)]
    embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
    # Tied files may carry a copy of the table; the configuration decides.
    head = embedding if config.tied_embeddings else take("lm_head.weight", config.vocab_size, hidden)
    final_norm = take("model.norm.weight", hidden)
    tensors.check_all_used({"lm_head.weight"} if config.tied_embeddings else set(), config.family)
    return LlamaWeights(embedding=embedding, layers=layers, final_norm=final_norm, lm_head=head)


def _read_layer(take: Callable[..., torch.Tensor], config: LlamaConfig, p: str) -> LayerWeights:
    """The layer whose tensors begin with `p`."""
    hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_width, kv_width = config.num_heads * dim, config.num_kv_heads * dim
    widths = (("q", q_width), ("k", kv_width), ("v", kv_width))

    def bias(wanted: bool, *parts: tuple[str, int]) -> torch.Tensor | None:
        return torch.cat([take(f"{p}.{name}.bias", width) for name, width in parts]) if wanted else None

    return LayerWeights(
        attention_norm=take(f"{p}.input_layernorm.weight", hidden),
        qkv=torch.cat([take(f"{p}.self_attn.{name}_proj.weight", width, hidden) for name, width in widths]),
        attention_out=take(f"{p}.self_attn.o_proj.weight", hidden, q_width),
        mlp_norm=take(f"{p}.post_attention_layernorm.weight", hidden),
        gate_up=torch.cat([take(f"{p}.mlp.{name}_proj.weight", ffn, hidden) for name in ("gate", "up")]),
        down=take(f"{p}.mlp.down_proj.weight", hidden, ffn),
        qkv_bias=bias(config.qkv_bias, *((f"self_attn.{name}_proj", width) for name, width in widths)),
        attention_out_bias=bias(config.attention_out_bias, ("self_attn.o_proj", hidden)),
        gate_up_bias=bias(config.mlp_bias, ("mlp.gate_proj", ffn), ("mlp.up_proj", ffn)),
        down_bias=bias(config.mlp_bias, ("mlp.down_proj", hidden)),
        q_norm=take(f"{p}.self_attn.q_norm.weight", dim) if config.qk_norm else None,
        k_norm=take(f"{p}.self_attn.k_norm.weight", dim) if config.qk_norm else None,
    )
