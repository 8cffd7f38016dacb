"""Hugging Face configuration. Owns: what config.json says of a decoder, family by family, as a LlamaConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.errors import ModelFormatError
from engine.models.json_file import read_json_object
from engine.models.llama_config import LlamaConfig, RopeScaling, yarn_magnitude

#: Fields whose other values change the arithmetic, with the only value that is computed here.
_FIXED: Final[dict[str, Any]] = {
    "hidden_act": "silu",
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}
#: The window of a file that does not name one, as the library that wrote it reads it.
_DEFAULT_WINDOW: Final = 4096
#: Likewise for the first layer of a qwen file that has one.
_DEFAULT_MAX_WINDOW_LAYERS: Final = 28


@dataclass(frozen=True, slots=True)
class _Family:
    """What the name of an architecture implies.

    qkv_bias       True, False, or None: `attention_bias` says, for the output projection too
    mlp_bias       `mlp_bias` says whether there is one; without this the field must be absent or false
    windows        never, always (`sliding_window` alone decides), flag (`use_sliding_window` decides)
    """

    qkv_bias: bool | None
    mlp_bias: bool
    qk_norm: bool
    windows: str


_FAMILIES: Final[dict[str, _Family]] = {
    "llama": _Family(qkv_bias=None, mlp_bias=True, qk_norm=False, windows="never"),
    "mistral": _Family(qkv_bias=False, mlp_bias=False, qk_norm=False, windows="always"),
    "qwen2": _Family(qkv_bias=True, mlp_bias=False, qk_norm=False, windows="flag"),
    "qwen3": _Family(qkv_bias=None, mlp_bias=False, qk_norm=True, windows="flag"),
}
#: Longest context that is worked with: what a position may be.
_MOST_CONTEXT: Final = 2**31 - 1
_ROPE_TYPES: Final = "'default', 'linear', 'dynamic', 'llama3' and 'yarn'"


def read_config(folder: Path) -> LlamaConfig:
    """The configuration in config.json, with the end tokens of generation_config.json when there is one."""
    path = folder / "config.json"
    raw = read_json_object(path)
    name = raw.get("model_type", "llama")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        known = ", ".join(map(repr, _FAMILIES))
        raise ModelFormatError(f"{path}: model_type is {name!r:.80}; supported are {known}")
    for field, only in _FIXED.items():
        if (value := raw.get(field)) is not None and value != only:
            raise ModelFormatError(f"{path}: {field} is {value!r:.80}; {only!r} is supported")
    heads, hidden = _int(path, raw, "num_attention_heads"), _int(path, raw, "hidden_size")
    if heads < 1:
        raise ModelFormatError(f"{path}: num_attention_heads is {heads}; at least 1 is needed")
    layers, context = _int(path, raw, "num_hidden_layers"), _int(path, raw, "max_position_embeddings")
    theta, scaling = _rope(path, raw, context)
    if scaling is not None and scaling.kind == "yarn":
        # Files of some families leave the limit at the trained context and expect the stretch to be added.
        context = max(context, int(min(min(scaling.original_context, _MOST_CONTEXT) * scaling.factor, _MOST_CONTEXT)))
    generation = folder / "generation_config.json"
    ends = read_json_object(generation) if generation.exists() else {}
    qkv_bias, out_bias, mlp_bias = _biases(path, raw, family)
    return LlamaConfig(
        vocab_size=_int(path, raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_int(path, raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_int(path, raw, "num_key_value_heads", heads),
        head_dim=_int(path, raw, "head_dim", hidden // heads),
        max_context_tokens=context,
        rope_theta=theta,
        rms_norm_eps=_float(path, raw, "rms_norm_eps", 1e-6),
        tied_embeddings=_bool(path, raw, "tie_word_embeddings", False),
        bos_token_id=_int(path, raw, "bos_token_id", None),
        eos_token_ids=_token_ids(generation, ends) or _token_ids(path, raw),
        rope_scaling=scaling,
        family=name,
        qkv_bias=qkv_bias,
        attention_out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        windows=_windows(path, raw, family, layers),
    ).check(path)


def _biases(path: Path, raw: Mapping[str, Any], family: _Family) -> tuple[bool, bool, bool]:
    """Whether q, k and v, the attention's output, and the MLP have biases."""
    said = _bool(path, raw, "attention_bias", False)
    in_mlp = _bool(path, raw, "mlp_bias", False)
    if said and family.qkv_bias is False:
        raise ModelFormatError(f"{path}: attention_bias is True; False is supported for this model_type")
    if in_mlp and not family.mlp_bias:
        raise ModelFormatError(f"{path}: mlp_bias is True; False is supported for this model_type")
    if family.qkv_bias is None:
        return said, said, in_mlp
    return family.qkv_bias, False, in_mlp


def _windows(path: Path, raw: Mapping[str, Any], family: _Family, layers: int) -> tuple[int, ...]:
    """Window of each layer, 0 where it sees everything; () when all do."""
    if family.windows == "never":
        return ()
    if family.windows == "flag" and not _bool(path, raw, "use_sliding_window", False):
        return ()
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return ()
    window = _int(path, raw, "sliding_window", _DEFAULT_WINDOW)
    if window < 1:
        raise ModelFormatError(f"{path}: sliding_window is {window}; at least 1, or null, is needed")
    if not 0 <= layers <= 1 << 20:
        raise ModelFormatError(f"{path}: num_hidden_layers is {layers}; at most {1 << 20} is possible here")
    if family.windows == "always":
        return (window,) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = _int(path, raw, "max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return tuple(window if layer >= first else 0 for layer in range(layers))
    known = {"sliding_attention": window, "full_attention": 0}
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise ModelFormatError(f"{path}: layer_types is {kinds!r:.80}; a list of {' and '.join(known)} is needed")
    return tuple(known[kind] for kind in kinds)


def _rope(path: Path, raw: Mapping[str, Any], context: int) -> tuple[float, RopeScaling | None]:
    """RoPE base and scaling, from `rope_parameters` (newer files) or `rope_theta` and `rope_scaling`."""
    params = raw.get("rope_parameters") or {}
    if not isinstance(params, dict) or any(isinstance(value, dict) for value in params.values()):
        raise ModelFormatError(f"{path}: rope_parameters is {params!r:.80}; an object of plain values is needed")
    theta = _float(path, params if "rope_theta" in params else raw, "rope_theta", 10000.0)
    scaling = raw.get("rope_scaling") or params
    if not isinstance(scaling, dict):
        raise ModelFormatError(f"{path}: rope_scaling is {scaling!r:.80}; an object is needed")
    if (share := scaling.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelFormatError(f"{path}: partial_rotary_factor is {share!r:.80}; 1.0 is supported")
    match kind := scaling.get("rope_type", scaling.get("type", "default")):
        # `dynamic` changes nothing up to max_position_embeddings, and that is the longest context there is here:
        # beyond it every K of a request would have to be turned anew with each token.
        case "default" | "dynamic":
            return theta, None
        case "linear":
            return theta, RopeScaling(kind="linear", factor=_float(path, scaling, "factor"))
        case "llama3":
            return theta, RopeScaling(
                kind="llama3",
                factor=_float(path, scaling, "factor"),
                low_freq_factor=_float(path, scaling, "low_freq_factor"),
                high_freq_factor=_float(path, scaling, "high_freq_factor"),
                original_context=_int(path, scaling, "original_max_position_embeddings"),
            )
        case "yarn":
            return theta, _yarn(path, scaling, context)
        case _:
            raise ModelFormatError(f"{path}: RoPE type is {kind!r:.80}; {_ROPE_TYPES} are supported")


def _yarn(path: Path, scaling: Mapping[str, Any], context: int) -> RopeScaling:
    original = _int(path, scaling, "original_max_position_embeddings", context)
    if original < 1:
        raise ModelFormatError(f"{path}: original_max_position_embeddings is {original}; at least 1 is needed")
    if scaling.get("factor") is not None:
        factor = _float(path, scaling, "factor")
    else:
        factor = max(1.0, min(context, _MOST_CONTEXT) / original)
    if not 1 <= factor < float("inf"):
        raise ModelFormatError(f"{path}: RoPE scaling factor is {factor}; at least 1 is needed")
    magnitude = yarn_magnitude(factor)
    if scaling.get("attention_factor") is not None:
        magnitude = _float(path, scaling, "attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        weights = (_float(path, scaling, field) for field in ("mscale", "mscale_all_dim"))
        above, below = (yarn_magnitude(factor, weight) for weight in weights)
        if below <= 0:
            raise ModelFormatError(f"{path}: mscale_all_dim gives a magnitude of {below}; more than 0 is needed")
        magnitude = above / below
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=_float(path, scaling, "beta_fast") if scaling.get("beta_fast") else 32.0,
        beta_slow=_float(path, scaling, "beta_slow") if scaling.get("beta_slow") else 1.0,
        magnitude=magnitude,
        truncate=_bool(path, scaling, "truncate", True),
    )


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
