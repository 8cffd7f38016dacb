"""Hugging Face loader. Owns: turning a folder of config.json and *.safetensors into a LlamaConfig and weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch

from engine.errors import ModelFormatError
from engine.models.json_file import read_json_object
from engine.models.llama_config import LlamaConfig, RopeScaling
from engine.models.weights import LayerWeights, LlamaWeights

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
#: Fields whose other values change the arithmetic, with the only value that is computed here.
_FIXED: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
}
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


def load_hf_folder(folder: Path, dtype: torch.dtype) -> tuple[LlamaConfig, LlamaWeights]:
    """Read configuration and weights; raises ModelFormatError on anything malformed or not supported."""
    config = read_config(folder)
    with _Tensors(folder) as tensors:
        return config, _read_weights(tensors, config, dtype)


def read_config(folder: Path) -> LlamaConfig:
    """The configuration in config.json, with the end tokens of generation_config.json when there is one."""
    path = folder / "config.json"
    raw = read_json_object(path)
    for field, only in _FIXED.items():
        if (value := raw.get(field, only)) != only:
            raise ModelFormatError(f"{path}: {field} is {value!r:.80}; {only!r} is supported")
    heads, hidden = _int(path, raw, "num_attention_heads"), _int(path, raw, "hidden_size")
    if heads < 1:
        raise ModelFormatError(f"{path}: num_attention_heads is {heads}; at least 1 is needed")
    theta, scaling = _rope(path, raw)
    generation = folder / "generation_config.json"
    ends = read_json_object(generation) if generation.exists() else {}
    return LlamaConfig(
        vocab_size=_int(path, raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_int(path, raw, "intermediate_size"),
        num_layers=_int(path, raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_int(path, raw, "num_key_value_heads", heads),
        head_dim=_int(path, raw, "head_dim", hidden // heads),
        max_context_tokens=_int(path, raw, "max_position_embeddings"),
        rope_theta=theta,
        rms_norm_eps=_float(path, raw, "rms_norm_eps", 1e-6),
        tied_embeddings=_bool(path, raw, "tie_word_embeddings", False),
        bos_token_id=_int(path, raw, "bos_token_id", None),
        eos_token_ids=_token_ids(generation, ends) or _token_ids(path, raw),
        rope_scaling=scaling,
    ).check(path)


def _rope(path: Path, raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling, from `rope_parameters` (newer files) or `rope_theta` and `rope_scaling`."""
    params = raw.get("rope_parameters") or {}
    if not isinstance(params, dict):
        raise ModelFormatError(f"{path}: rope_parameters is {params!r:.80}; an object is needed")
    theta = _float(path, params if "rope_theta" in params else raw, "rope_theta", 10000.0)
    scaling = raw.get("rope_scaling") or params
    if not isinstance(scaling, dict):
        raise ModelFormatError(f"{path}: rope_scaling is {scaling!r:.80}; an object is needed")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=_float(path, scaling, "factor"))
    if kind != "llama3":
        raise ModelFormatError(f"{path}: RoPE type is {kind!r:.80}; 'default', 'linear' and 'llama3' are supported")
    return theta, RopeScaling(
        kind=kind,
        factor=_float(path, scaling, "factor"),
        low_freq_factor=_float(path, scaling, "low_freq_factor"),
        high_freq_factor=_float(path, scaling, "high_freq_factor"),
        original_context=_int(path, scaling, "original_max_position_embeddings"),
    )


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

    def check_all_used(self, ignored: set[str]) -> None:
        """A tensor that nothing asked for would change the answers, silently: refuse it."""
        # Older files store the rotary frequencies, which follow from the configuration.
        unused = {n for n in self._where if not n.endswith("rotary_emb.inv_freq")} - self._seen - ignored
        if unused:
            raise ModelFormatError(
                f"{self._folder}: tensor {min(unused)} has no place in a llama model ({len(unused)} such)"
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
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def take(name: str, *shape: int) -> torch.Tensor:
        return tensors.take(name, shape, dtype)

    layers = []
    for i in range(config.num_layers):
        p = f"model.layers.{i}"
        q = take(f"{p}.self_attn.q_proj.weight", q_width, hidden)
        k, v = (take(f"{p}.self_attn.{name}_proj.weight", kv_width, hidden) for name in "kv")
        gate, up = (take(f"{p}.mlp.{name}_proj.weight", ffn, hidden) for name in ("gate", "up"))
        layers.append(
            LayerWeights(
                attention_norm=take(f"{p}.input_layernorm.weight", hidden),
                qkv=torch.cat((q, k, v)),
                attention_out=take(f"{p}.self_attn.o_proj.weight", hidden, q_width),
                mlp_norm=take(f"{p}.post_attention_layernorm.weight", hidden),
                gate_up=torch.cat((gate, up)),
                down=take(f"{p}.mlp.down_proj.weight", hidden, ffn),
            )
        )
    embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
    # Tied files may carry a copy of the table; the configuration decides.
    head = embedding if config.tied_embeddings else take("lm_head.weight", config.vocab_size, hidden)
    final_norm = take("model.norm.weight", hidden)
    tensors.check_all_used({"lm_head.weight"} if config.tied_embeddings else set())
    return LlamaWeights(embedding=embedding, layers=layers, final_norm=final_norm, lm_head=head)


def _int(path: Path, raw: Mapping[str, Any], field: str, default: Any = ...) -> Any:
    value = raw.get(field)
    if value is None and default is not ...:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelFormatError(f"{path}: {field} is {value!r:.80}; an integer is needed")
    return value


def _float(path: Path, raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = raw.get(field, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ModelFormatError(f"{path}: {field} is {value!r:.80}; a number is needed")
    try:
        return float(value)
    except OverflowError:
        raise ModelFormatError(f"{path}: {field} is an integer beyond every number that is computed here") from None


def _bool(path: Path, raw: Mapping[str, Any], field: str, default: bool) -> bool:
    value = raw.get(field, default)
    if not isinstance(value, bool):
        raise ModelFormatError(f"{path}: {field} is {value!r:.80}; true or false is needed")
    return value


def _token_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ModelFormatError(f"{path}: eos_token_id is {value!r:.80}; an integer or a list of integers is needed")
    return tuple(dict.fromkeys(ids))
