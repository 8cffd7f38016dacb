"""GGUF files: what a converter writes is read back exactly; what is malformed or not supported is refused by name."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelFormatError
from engine.models.gguf_file import GgufFile
from engine.models.gguf_loader import load_gguf
from engine.models.loader import load_model, load_weights
from engine.models.packaged import INSTALL_COMMAND, model_name, packaged_gguf_path
from tests.engine.models.gguf_files import DIM, FFN, HEADS, HIDDEN, KV_HEADS, VOCAB, tiny_weights, write_gguf


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0, Kind.Q5_1])
def test_weights_come_back_dequantised_and_in_rotate_half_order(tmp_path: Path, kind: Kind) -> None:
    weights = tiny_weights()
    config, loaded = load_gguf(write_gguf(tmp_path / "m.gguf", weights, kind=kind), torch.float32)

    def stored(name: str) -> torch.Tensor:
        """Quantised row by row, so that the row order does not matter."""
        array = weights[name]
        if kind is Kind.F32:
            return torch.from_numpy(array)
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind))

    assert (config.vocab_size, config.num_layers, config.head_dim) == (VOCAB, 2, DIM)
    assert config.tied_embeddings
    assert loaded.lm_head is loaded.embedding
    assert config.eos_token_ids == (2, 7)
    assert config.bos_token_id == 1
    for i, layer in enumerate(loaded.layers):
        q, k, v = layer.qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM])
        gate, up = layer.gate_up.split(FFN)
        for tensor, name in ((q, "attn_q"), (k, "attn_k"), (v, "attn_v"), (gate, "ffn_gate"), (up, "ffn_up")):
            assert torch.equal(tensor, stored(f"blk.{i}.{name}.weight")), name
        assert torch.equal(layer.down, stored(f"blk.{i}.ffn_down.weight"))
        assert torch.equal(layer.attention_norm, torch.from_numpy(weights[f"blk.{i}.attn_norm.weight"]))
    assert torch.equal(loaded.embedding, stored("token_embd.weight"))


def test_an_untied_head_is_read(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["output.weight"] = weights["token_embd.weight"][::-1].copy()
    config, loaded = load_gguf(write_gguf(tmp_path / "m.gguf", weights), torch.float32)
    assert not config.tied_embeddings
    assert torch.equal(loaded.lm_head, loaded.embedding.flip(0))


def test_a_head_norm_has_no_place_in_llama(tmp_path: Path) -> None:
    weights = tiny_weights() | {"blk.0.attn_q_norm.weight": np.ones(DIM, dtype=np.float32)}
    with pytest.raises(ModelFormatError, match=r"blk.0.attn_q_norm.weight has no place in a llama model \(1 such\)"):
        load_gguf(write_gguf(tmp_path / "m.gguf", weights), torch.float32)


@pytest.mark.parametrize("factors", [np.ones(DIM // 2 + 1), np.zeros(DIM // 2), np.full(DIM // 2, np.inf)])
def test_rope_factors_that_do_not_fit_are_refused(tmp_path: Path, factors: np.ndarray) -> None:
    weights = tiny_weights() | {"rope_freqs.weight": factors.astype(np.float32)}
    with pytest.raises(ModelFormatError, match=r"rope_freqs.weight has shape|a RoPE factor is (0.0|inf)"):
        load_gguf(write_gguf(tmp_path / "m.gguf", weights), torch.float32)


#: What the package can read and cannot write: blocks of these are random bytes with sane scales.
READ_ONLY = [
    Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS,
    Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4,
]  # fmt: skip


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.TQ1_0, Kind.TQ2_0, *READ_ONLY], ids=lambda kind: kind.name)
def test_every_common_quantisation_is_read(tmp_path: Path, kind: Kind) -> None:
    """A tensor of 512 columns (two of the largest blocks) equals what the package's own reader makes of the file."""
    rng = np.random.default_rng(kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # Bytes below 48: as 16-bit floats (scales) these are small and finite wherever a format keeps them.
    raw = rng.integers(0, 48, (6, 512 // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    (tensor,) = gguf.GGUFReader(str(tmp_path / "m.gguf")).tensors
    want = gguf.quants.dequantize(tensor.data, kind)
    with GgufFile(tmp_path / "m.gguf") as file:
        got = file.dequantize("t", (6, 512))
    assert np.isfinite(got).all()
    assert np.unique(got).size > 2
    assert np.array_equal(got, want)


@pytest.mark.model
def test_metadata_reads_as_the_gguf_package_reads_it() -> None:
    """Every key of a real file, arrays of 49,152 strings included, equals what the package's own reader says."""
    path = packaged_gguf_path()
    with GgufFile(path) as file:
        reader = gguf.GGUFReader(str(path))
        names = [name for name in reader.fields if not name.startswith("GGUF.")]
        assert list(file.metadata) == names
        for name in names:
            assert file.metadata[name] == reader.fields[name].contents(), name
        assert {t.name: (tuple(t.shape.tolist())[::-1], t.data_offset) for t in reader.tensors} == {
            name: (info.shape, info.start) for name, info in file.tensors.items()
        }


UNSUPPORTED: dict[str, tuple[dict[str, object], str]] = {
    "architecture": (
        {"arch": "gemma2"},
        r"general.architecture is 'gemma2'; supported are 'llama', 'qwen2', 'qwen3'",
    ),
    "qwen2 without biases": ({"arch": "qwen2"}, r"tensor blk.0.attn_q.bias is missing"),
    "qwen3 without head norms": ({"arch": "qwen3"}, r"tensor blk.0.attn_q_norm.weight is missing"),
    "no block count": ({"drop_keys": ("block_count",)}, r"metadata key llama.block_count is missing"),
    "zero layers": ({"block_count": 0}, r"num_layers is 0; at least 1"),
    "heads not a multiple": ({"attention.head_count_kv": 3}, r"num_heads is 4, .* no multiple of num_kv_heads, 3"),
    "value length": ({"attention.value_length": 8}, r"attention.value_length is 8; only the key length, 16"),
    "partial rotary": ({"rope.dimension_count": 8}, r"rope.dimension_count is 8"),
    "scaling": (
        {"rope.scaling.type": "longrope"},
        r"llama.rope.scaling.type is 'longrope'; 'none', 'linear' and 'yarn' are supported",
    ),
    "scaling without factor": ({"rope.scaling.type": "yarn"}, r"metadata key llama.rope.scaling.factor is missing"),
    "shrinking": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.5},
        r"llama.rope.scaling.factor is 0.5; at least 1",
    ),
    "yarn of another kind": ({"rope.scaling.yarn_ext_factor": 0.5}, r"yarn_ext_factor is 0.5; 1.0 is supported"),
    "window by pattern": (
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2},
        r"sliding_window_pattern is present; one window for all layers",
    ),
    "count as text": ({"context_length": "many"}, r"llama.context_length is 'many'; a int is needed"),
    "context too short": ({"context_length": 1}, r"max_context_tokens is 1; at least 2"),
    "epsilon": ({"attention.layer_norm_rms_epsilon": 0.0}, r"rms_norm_eps is 0.0; a finite number above 0"),
    "too many layers": ({"block_count": 3}, r"tensor blk.2.attn_norm.weight is missing"),
    "too few layers": ({"block_count": 1}, r"tensor blk.1.attn_k.weight has no place in a llama model \(9 such\)"),
    "wrong ffn": (
        {"feed_forward_length": 95},
        r"tensor blk.0.ffn_gate.weight has shape \(96, 64\); \(95, 64\) is needed",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_files_name_field_value_and_limit(tmp_path: Path, case: str) -> None:
    changes, message = UNSUPPORTED[case]
    path = write_gguf(tmp_path / "model.gguf", tiny_weights(), **changes)
    with pytest.raises(ModelFormatError, match=message) as caught:
        load_gguf(path, torch.float32)
    assert str(path) in str(caught.value)


def header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"cannot be read as a GGUF file"),
    "short": (b"GG", r"magic needs bytes 0 to 4; the file has 2 bytes"),
    "other magic": (header(magic=b"GGJT"), r"starts with b'GGJT'"),
    "old version": (header(version=1), r"GGUF version is 1; 2 and 3"),
    "big-endian": (header(version=0x03000000), r"GGUF version is 50331648"),
    "counts cut off": (b"GGUF" + struct.pack("<I", 3), r"tensor count needs bytes 8 to 16; the file has 8"),
    "absurd key count": (header(keys=1 << 40), r"key count is 1099511627776; at most 65536"),
    "absurd tensor count": (header(tensors=1 << 40), r"tensor count is 1099511627776; at most 1048576"),
    "absurd string": (header(keys=1, rest=text(b"k", length=1 << 50)), r"length of metadata key is 1125899906842624"),
    "key not text": (header(keys=1, rest=text(b"\xff\xfe")), r"metadata key is not UTF-8"),
    "unknown type": (header(keys=1, rest=text(b"k") + struct.pack("<I", 99)), r"metadata key k has type 99"),
    "absurd array": (
        header(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60)),
        r"length of k is 1152921504606846976; at most 0",
    ),
    "array of arrays of arrays": (
        header(keys=1, rest=text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 6 + b"\0" * 64),
        r"nests arrays deeper than 4",
    ),
    "nine dimensions": (header(tensors=1, rest=text(b"t") + struct.pack("<I", 9)), r"tensor t has 9 dimensions"),
    "unknown tensor type": (
        header(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 32, 999, 0)),
        r"tensor t has GGML type 999",
    ),
    "half a block": (
        header(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 31, 8, 0)),
        r"tensor t has rows of 31 elements; its type needs a multiple of 32",
    ),
    "data cut off": (
        header(tensors=1, rest=text(b"t") + struct.pack("<IQIQ", 1, 64, 0, 0)),
        r"tensor t ends at byte 320; the file has \d+ bytes",
    ),
    "alignment": (
        header(keys=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 3)),
        r"general.alignment is 3; a power of two",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_before_memory_is_spent(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=message) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)


@given(data=st.data())
@settings(max_examples=150)
def test_a_damaged_file_is_read_or_refused_never_more(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes of the header changed or the file cut: a ModelFormatError or a model, no other exception."""
    base = tmp_path_factory.getbasetemp() / "whole.gguf"
    if not base.exists():
        write_gguf(base, tiny_weights())
    content = bytearray(base.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    for _ in range(data.draw(st.integers(1, 4))):
        if content:
            content[data.draw(st.integers(0, min(len(content), 12_000) - 1))] = data.draw(st.integers(0, 255))
    damaged = base.with_name("damaged.gguf")
    damaged.write_bytes(content)
    with contextlib.suppress(ModelFormatError):
        load_gguf(damaged, torch.float32)


@pytest.mark.model
def test_the_packaged_file_is_found_without_importing_the_package() -> None:
    path = packaged_gguf_path()
    assert path.suffix == ".gguf"
    assert model_name(path) == "SmolLM2-135M-Instruct"


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.models.packaged.PACKAGE", "no_such_package_here")
    with pytest.raises(ModelFormatError, match="not installed") as caught:
        packaged_gguf_path()
    assert INSTALL_COMMAND in str(caught.value)


def test_a_path_that_is_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="does not exist"):
        load_weights(tmp_path / "absent", torch.float32)


def test_an_absurd_context_costs_no_memory_at_load(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_weights(), context_length=2**31)
    model = load_model(path, dtype=torch.bfloat16)
    assert model.config.max_context_tokens == 2**31
    assert model.dtype is torch.bfloat16


def test_hidden_size_need_not_be_heads_times_dim(tmp_path: Path) -> None:
    """`key_length` wins over hidden / heads."""
    weights = tiny_weights()
    rng = np.random.default_rng(1)
    for i in range(2):
        for name, rows, columns in (
            ("attn_q", HEADS * 8, HIDDEN), ("attn_k", KV_HEADS * 8, HIDDEN), ("attn_v", KV_HEADS * 8, HIDDEN),
            ("attn_output", HIDDEN, HEADS * 8),
        ):  # fmt: skip
            weights[f"blk.{i}.{name}.weight"] = rng.standard_normal((rows, columns)).astype(np.float32)
    config, _ = load_gguf(
        write_gguf(tmp_path / "m.gguf", weights, **{"attention.key_length": 8, "attention.value_length": 8}),
        torch.float32,
    )
    assert config.head_dim == 8
