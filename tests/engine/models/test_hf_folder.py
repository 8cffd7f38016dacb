"""Hugging Face folders: one file or many, old and new field names; what is not supported is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelFormatError
from engine.models.hf_loader import load_hf_folder, read_config
from engine.models.llama_config import LlamaConfig, RopeScaling
from engine.models.loader import load_weights

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens": (96, 32), "lm_head": (96, 32), "model.norm": (32,)}
    for i in range(2):
        p = f"model.layers.{i}"
        shapes |= {
            f"{p}.self_attn.{n}_proj": s for n, s in zip("qkvo", ((32, 32), (16, 32), (16, 32), (32, 32)), strict=True)
        }
        shapes |= {f"{p}.mlp.{n}_proj": s for n, s in (("gate", (48, 32)), ("up", (48, 32)), ("down", (32, 48)))}
        shapes |= {f"{p}.{n}_layernorm": (32,) for n in ("input", "post_attention")}
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_folder(
    folder: Path, *, config: dict[str, Any] | None = None, weights: dict[str, torch.Tensor] | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(tensors() if weights is None else weights, folder / "model.safetensors")
    return folder


def shard(folder: Path) -> Path:
    """Split model.safetensors into two files and an index."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: whole[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_one_file_and_shards_give_the_same_weights(tmp_path: Path) -> None:
    config, one = load_weights(write_folder(tmp_path / "one"), torch.float32)
    sharded_config, many = load_weights(shard(write_folder(tmp_path / "many")), torch.float32)
    assert config == sharded_config
    assert torch.equal(one.embedding, many.embedding)
    assert torch.equal(one.lm_head, many.lm_head)
    for a, b in zip(one.layers, many.layers, strict=True):
        for name in a.__slots__:
            x, y = getattr(a, name), getattr(b, name)
            assert x is y is None or torch.equal(x, y)
    raw = tensors()
    qkv = torch.cat([raw[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(one.layers[1].qkv, qkv)


def test_config_facts(tmp_path: Path) -> None:
    assert read_config(write_folder(tmp_path)) == LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        max_context_tokens=256, rope_theta=50000.0, rms_norm_eps=1e-5, tied_embeddings=False, bos_token_id=1,
        eos_token_ids=(2,),
    )  # fmt: skip


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2, 5]}')
    assert read_config(folder).eos_token_ids == (5, 2)
    (folder / "generation_config.json").write_text("{}")
    assert read_config(folder).eos_token_ids == (2,)


def test_rope_is_read_from_old_and_new_fields(tmp_path: Path) -> None:
    old = {k: v for k, v in CONFIG.items() if k != "rope_theta"}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}  # fmt: skip
    want = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    new_style = read_config(write_folder(tmp_path, config=old | {"rope_parameters": llama3 | {"rope_theta": 7e4}}))
    old_style = read_config(write_folder(tmp_path, config=old | {"rope_theta": 7e4, "rope_scaling": llama3}))
    assert new_style == old_style
    assert (new_style.rope_theta, new_style.rope_scaling) == (7e4, want)
    linear = read_config(write_folder(tmp_path, config=CONFIG | {"rope_scaling": {"type": "linear", "factor": 2}}))
    assert linear.rope_scaling == RopeScaling("linear", 2.0)


def test_yarn_gives_the_context_that_it_stretches_to(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = read_config(write_folder(tmp_path, config=CONFIG | {"rope_scaling": scaling}))
    assert config.max_context_tokens == 1024
    assert config.rope_scaling is not None
    assert config.rope_scaling.magnitude == pytest.approx(1.1386, abs=1e-4)


def test_dynamic_changes_nothing_up_to_the_context_and_there_is_no_more(tmp_path: Path) -> None:
    config = read_config(write_folder(tmp_path, config=CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}))
    assert config == read_config(write_folder(tmp_path))
    assert config.max_context_tokens == 256


def test_windows_are_those_that_the_writing_library_would_use(tmp_path: Path) -> None:
    def windows(**change: Any) -> tuple[int, ...]:
        return read_config(write_folder(tmp_path, config=CONFIG | change)).windows

    assert windows(model_type="mistral") == (4096, 4096)
    assert windows(model_type="mistral", sliding_window=None) == ()
    assert windows(model_type="llama", sliding_window=64) == ()
    assert windows(model_type="qwen2", sliding_window=64) == ()
    assert windows(model_type="qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=1) == (0, 64)
    assert windows(model_type="qwen2", sliding_window=64, use_sliding_window=True) == (0, 0)


def test_a_tied_model_needs_no_head_and_ignores_one(tmp_path: Path) -> None:
    for weights in (tensors(), {n: t for n, t in tensors().items() if n != "lm_head.weight"}):
        _, loaded = load_hf_folder(
            write_folder(tmp_path, config=CONFIG | {"tie_word_embeddings": True}, weights=weights), torch.float32
        )
        assert loaded.lm_head is loaded.embedding


def test_half_precision_files_are_converted(tmp_path: Path) -> None:
    weights = {name: tensor.half() for name, tensor in tensors().items()}
    _, loaded = load_hf_folder(write_folder(tmp_path, weights=weights), torch.float32)
    assert loaded.embedding.dtype is torch.float32
    assert torch.equal(loaded.embedding, weights["model.embed_tokens.weight"].float())


def test_old_rotary_buffers_are_passed_over(tmp_path: Path) -> None:
    weights = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    load_hf_folder(write_folder(tmp_path, weights=weights), torch.float32)


BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "other family": (
        {"model_type": "gpt2"},
        r"model_type is 'gpt2'; supported are 'llama', 'mistral', 'qwen2', 'qwen3'",
    ),
    "family that is no name": ({"model_type": ["llama"]}, r"model_type is \['llama'\]; supported are"),
    "other activation": ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'; 'silu'"),
    "attention bias": ({"model_type": "mistral", "attention_bias": True}, r"attention_bias is True; False is"),
    "mlp bias": ({"model_type": "qwen3", "mlp_bias": True}, r"mlp_bias is True; False is supported"),
    "bias as text": ({"attention_bias": "no"}, r"attention_bias is 'no'; true or false"),
    "part of each head turned": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5; 1.0 is supported"),
    "window of nothing": ({"model_type": "mistral", "sliding_window": 0}, r"sliding_window is 0; at least 1, or null"),
    "other kind of layer": (
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention", "linear_attention"]},
        r"layer_types is \['full_attention', 'linear_attention'\]; a list of sliding_attention and full_attention",
    ),
    "kinds of too few layers": (
        {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
        r"layer_types names 1 layers; num_layers is 2",
    ),
    "quantised": ({"quantization_config": {"bits": 4}}, r"quantization_config is \{'bits': 4\}; None"),
    "size as text": ({"hidden_size": "32"}, r"hidden_size is '32'; an integer is needed"),
    "size as bool": ({"vocab_size": True}, r"vocab_size is True; an integer is needed"),
    "no heads": ({"num_attention_heads": 0}, r"num_attention_heads is 0; at least 1"),
    "no kv heads": ({"num_key_value_heads": 0}, r"num_kv_heads is 0; at least 1"),
    "uneven groups": ({"num_key_value_heads": 3}, r"no multiple of num_kv_heads, 3"),
    "odd head": ({"head_dim": 7}, r"head_dim is 7; RoPE needs an even number"),
    "longrope": (
        {"rope_scaling": {"rope_type": "longrope"}},
        r"RoPE type is 'longrope'; 'default', 'linear', 'dynamic', 'llama3' and 'yarn' are supported",
    ),
    "rope by layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        r"rope_parameters is .* an object of plain values",
    ),
    "yarn that shrinks": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 0.5}},
        r"RoPE scaling factor is 0.5; at least 1",
    ),
    "yarn without a ramp": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 1}},
        r"beta_fast is 1.0 and beta_slow 1.0",
    ),
    "yarn of base 1": ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"yarn needs more"),
    "factor below one": ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, r"factor is 0.5; at least 1"),
    "factor missing": ({"rope_scaling": {"rope_type": "linear"}}, r"factor is None; a number is needed"),
    "flat llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 4,
                          "original_max_position_embeddings": 64}},
        r"high_freq_factor is 4.0; more than low_freq_factor, 4.0, is needed",
    ),
    "negative theta": ({"rope_theta": -1.0}, r"rope_theta is -1.0; a finite number above 0"),
    "end outside": ({"eos_token_id": 96}, r"special token id 96 is outside the vocabulary of 96 tokens"),
    "end as text": ({"eos_token_id": ["2"]}, r"eos_token_id is \['2'\]; an integer or a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_unsupported_configs_name_field_value_and_limit(tmp_path: Path, case: str) -> None:
    change, message = BAD_FIELDS[case]
    folder = write_folder(tmp_path, config=CONFIG | change)
    with pytest.raises(ModelFormatError, match=message) as caught:
        read_config(folder)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_folder(tmp_path)
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"config.json: (cannot be read as JSON|holds a list)"):
        read_config(folder)


def without(name: str) -> dict[str, torch.Tensor]:
    return {n: t for n, t in tensors().items() if n != name}


BAD_TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "missing": (without("model.layers.1.mlp.up_proj.weight"), r"tensor model.layers.1.mlp.up_proj.weight is missing"),
    "no head": (without("lm_head.weight"), r"tensor lm_head.weight is missing"),
    "shape": (
        tensors() | {"model.norm.weight": torch.ones(33)},
        r"model.norm.weight has shape \(33,\); \(32,\) is needed",
    ),
    "integers": (
        tensors() | {"model.norm.weight": torch.ones(32, dtype=torch.int32)},
        r"model.norm.weight is torch.int32; float32, float16, bfloat16",
    ),
    "extra": (
        tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)},
        r"tensor model.layers.0.self_attn.q_proj.bias has no place in a llama model \(1 such\)",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, case: str) -> None:
    weights, message = BAD_TENSORS[case]
    with pytest.raises(ModelFormatError, match=message):
        load_hf_folder(write_folder(tmp_path, weights=weights), torch.float32)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_hf_folder(folder, torch.float32)


def test_a_cut_safetensors_file_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match=r"model.safetensors: cannot be read as a safetensors file"):
        load_hf_folder(folder, torch.float32)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("../outside.safetensors", r"a plain file name is needed"),
        ("/etc/passwd", r"a plain file name is needed"),
        (7, r"is 7; a plain file name is needed"),
        ("absent.safetensors", r"'absent.safetensors', which the folder does not hold"),
    ],
)
def test_an_index_may_not_lead_out_of_its_folder(tmp_path: Path, target: object, message: str) -> None:
    folder = shard(write_folder(tmp_path))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = target
    path.write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match=message):
        load_hf_folder(folder, torch.float32)


def test_an_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    folder = shard(write_folder(tmp_path))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    index = dict.fromkeys(index, "model-00001-of-00002.safetensors")
    path.write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ModelFormatError, match=r"00001-of-00002.safetensors: tensor .* cannot be read"):
        load_hf_folder(folder, torch.float32)
    path.write_text('{"weight_map": []}')
    with pytest.raises(ModelFormatError, match=r"weight_map is \[\]; an object is needed"):
        load_hf_folder(folder, torch.float32)
