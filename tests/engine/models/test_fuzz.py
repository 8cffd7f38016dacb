"""Model files that lie: whatever a header says, loading ends with a model or a ModelFormatError that names the file.

No crash, no other exception, no memory that the file does not have. Damage is drawn by Hypothesis: bytes, lengths,
offsets, shapes, types, and the values of every JSON field.
"""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from engine.errors import ModelFormatError
from engine.models.gguf_file import GgufFile
from engine.models.gguf_loader import load_gguf
from engine.models.hf_loader import load_hf_folder
from engine.text.gguf_tokenizer import tokenizer_from_metadata
from engine.text.hf_tokenizer import HfTokenizer
from tests.engine.models.gguf_files import tiny_weights, write_gguf
from tests.engine.models.test_hf_folder import CONFIG, tensors
from tests.engine.text.test_tokenizers import byte_level_backend

#: What loading may add to the largest size of this process; the files have some 200 KB.
MOST_KIB = 256 * 1024
#: The folder of a test is used again by all its examples: each writes its file anew.
EFFORT = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])

HUGE = [0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, 2**64, 10**30, -(10**30)]
#: Values that no field of a configuration expects, and some that it does.
oddities = st.one_of(
    st.sampled_from(HUGE),
    st.integers(-5, 5),
    st.floats(allow_nan=True, allow_infinity=True),
    st.booleans(),
    st.none(),
    st.sampled_from(["", "2", "llama", "default", "\x00", "..", "a" * 1000, "\ud800"]),
    st.lists(st.one_of(st.integers(-1, 100), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "content", "x"]), st.integers(-2, 9), max_size=2),
)
DEEP = b"[" * 200_000


@pytest.fixture(autouse=True)
def memory_stays() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KIB


def refusal_of(load: Callable[[], object]) -> str | None:
    """What a ModelFormatError says, None when loading went well. Long values are not quoted whole."""
    try:
        load()
    except ModelFormatError as error:
        said = str(error)
    else:
        return None
    assert len(said) < 2000
    return said


def loads_or_refuses(folder: Path) -> bool:
    """True: it loaded. A refusal has to name the folder."""
    refusal = refusal_of(lambda: load_hf_folder(folder, torch.float32))
    assert refusal is None or str(folder) in refusal
    return refusal is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "model.safetensors").write_bytes(save(tensors()))
    assert loads_or_refuses(made)
    return made


@pytest.fixture
def whole(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a file that is right."""
    content = save(tensors())
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def packed(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


# -- safetensors -------------------------------------------------------------------------------------------------------

NAMES = sorted(tensors())
offsets = st.lists(st.one_of(st.sampled_from(HUGE), st.integers(0, 70_000)), min_size=0, max_size=3)
shapes = st.lists(st.one_of(st.sampled_from(HUGE), st.integers(0, 100)), max_size=5)
changes = st.one_of(
    st.tuples(st.just("data_offsets"), st.one_of(offsets, oddities)),
    st.tuples(st.just("shape"), st.one_of(shapes, oddities)),
    st.tuples(
        st.just("dtype"),
        st.one_of(st.sampled_from(["F64", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "F4", "C64", "U64", "X"]), oddities),
    ),
    st.tuples(st.just("other"), oddities),
)


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@EFFORT
@given(name=st.sampled_from(NAMES), change=changes, also=st.booleans())
def test_a_tensor_that_is_described_wrongly(
    folder: Path, whole: tuple[dict[str, Any], bytes], name: str, change: tuple[str, Any], also: bool
) -> None:
    header, data = whole
    damaged = {key: dict(value) for key, value in header.items()}
    field, value = change
    damaged[name][field] = value
    if also:  # the same place for two tensors
        damaged[name]["data_offsets"] = damaged[NAMES[0]]["data_offsets"]
    write(folder / "model.safetensors", packed(json.dumps(damaged).encode("utf-8", "surrogatepass"), data))
    loads_or_refuses(folder)


@EFFORT
@given(
    length=st.one_of(st.none(), st.sampled_from([n % 2**64 for n in HUGE]), st.integers(0, 4000)),
    cut=st.one_of(st.none(), st.integers(0, 60_000)),
    flips=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=4),
    tail=st.binary(max_size=20),
)
def test_a_safetensors_file_with_damaged_bytes(
    folder: Path,
    whole: tuple[dict[str, Any], bytes],
    length: int | None,
    cut: int | None,
    flips: list[tuple[int, int]],
    tail: bytes,
) -> None:
    header, data = whole
    content = bytearray(packed(json.dumps(header).encode(), data, length) + tail)
    for place, value in flips:
        content[place] = value
    write(folder / "model.safetensors", bytes(content if cut is None else content[:cut]))
    loads_or_refuses(folder)


HEADERS: dict[str, bytes] = {
    "empty": b"",
    "nothing": b"{}",
    "list": b"[]",
    "number": b"7",
    "NaN": b"NaN",
    "deep": DEEP,
    "deep objects": b'{"a":' * 100_000,
    "metadata as list": b'{"__metadata__": []}',
    "metadata of numbers": b'{"__metadata__": {"a": 1}}',
    "only metadata": b'{"__metadata__": {"a": "b"}}',
    "the same name twice": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "shape whose product wraps": b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}',
    "not text": b'{"\xff": 1}',
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93.",
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_are_none(folder: Path, case: str) -> None:
    write(folder / "model.safetensors", packed(HEADERS[case], b""))
    assert not loads_or_refuses(folder)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.pkl", "consolidated.00.pth"])
def test_pickles_are_never_opened(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    witness = tmp_path / "witness"
    torch.save({"a": torch.ones(1)}, tmp_path / file)
    (tmp_path / "evil.pkl").write_bytes(b"cposix\nsystem\n(S'touch " + str(witness).encode() + b"'\ntR.")
    assert not loads_or_refuses(tmp_path)
    index = {"weight_map": dict.fromkeys(NAMES, "evil.pkl")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not loads_or_refuses(tmp_path)
    assert not witness.exists()


# -- JSON beside the weights -------------------------------------------------------------------------------------------

FIELDS = [
    *CONFIG, "head_dim", "rope_scaling", "rope_parameters", "hidden_act", "attention_bias", "quantization_config",
    "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
]  # fmt: skip
#: So that every branch is met: a scaling that asks for more fields than oddities would spell.
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8, "beta_slow": 1,
             "mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": None, "truncate": True}  # fmt: skip


@EFFORT
@given(changes=st.dictionaries(st.sampled_from(FIELDS), oddities, min_size=1, max_size=3))
@example(changes={"rope_theta": 10**400})
@example(changes={"tie_word_embeddings": "false"})
@example(changes={"num_hidden_layers": 10**18})
@example(changes={"rope_scaling": {"rope_type": "linear", "factor": 10**400}})
@example(changes={"hidden_act": "a" * 100_000})
@example(changes={"model_type": "mistral", "num_hidden_layers": 10**12})
@example(changes={"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": -1})
@example(changes={"rope_scaling": STRETCHED, "max_position_embeddings": 10**400})
def test_a_config_with_odd_values(folder: Path, changes: dict[str, Any]) -> None:
    write(folder / "model.safetensors", save(tensors()))
    write(folder / "config.json", json.dumps(CONFIG | changes).encode("utf-8", "surrogatepass"))
    loads_or_refuses(folder)


@EFFORT
@given(
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    changes=st.dictionaries(st.sampled_from(FIELDS), oddities, max_size=2),
    scaling=st.dictionaries(st.sampled_from(sorted(STRETCHED)), oddities, max_size=2),
)
@example(family="llama", changes={}, scaling={"factor": 10**400})
@example(family="llama", changes={}, scaling={"mscale": -(10**30), "mscale_all_dim": -1000.0})
@example(family="llama", changes={"max_position_embeddings": 10**400}, scaling={"factor": None})
def test_a_config_of_every_family_with_odd_values(
    folder: Path, family: str, changes: dict[str, Any], scaling: dict[str, Any]
) -> None:
    write(folder / "model.safetensors", save(tensors()))
    config = CONFIG | {"model_type": family, "rope_scaling": STRETCHED | scaling} | changes
    write(folder / "config.json", json.dumps(config).encode("utf-8", "surrogatepass"))
    loads_or_refuses(folder)


@pytest.mark.parametrize("content", [DEEP, b'{"a":' * 100_000, b"{" + b" " * 1_000_000, b"1" * 5000, b'"\\ud800"'])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_that_is_none(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / file).write_bytes(content)
    assert not loads_or_refuses(tmp_path)


def test_a_flag_that_is_no_flag_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": "false"}))
    (tmp_path / "model.safetensors").write_bytes(save(tensors()))
    with pytest.raises(ModelFormatError, match=r"tie_word_embeddings is 'false'; true or false"):
        load_hf_folder(tmp_path, torch.float32)


@pytest.mark.parametrize("target", ["..", ".", "", "a\x00b", "a/b", "\ud800", "x" * 5000])
def test_an_index_with_an_odd_file_name(tmp_path: Path, target: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, target)}))
    assert not loads_or_refuses(tmp_path)


# -- tokenizers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    byte_level_backend().save(str(made / "tokenizer.json"))
    return made


def reads_or_refuses(folder: Path) -> HfTokenizer | None:
    made: list[HfTokenizer] = []
    refusal = refusal_of(lambda: made.append(HfTokenizer.from_folder(folder)))
    assert refusal is None or str(folder) in refusal
    return made[0] if made else None


@EFFORT
@given(
    settings_=st.dictionaries(st.sampled_from(["bos_token", "eos_token", "chat_template"]), oddities, max_size=3),
    config=st.dictionaries(st.sampled_from(["eos_token_id", "bos_token_id"]), oddities, max_size=2),
)
@example(settings_={}, config={"eos_token_id": 1.5})
def test_tokenizer_settings_with_odd_values(
    tokenizer_folder: Path, settings_: dict[str, Any], config: dict[str, Any]
) -> None:
    for file, content in (("tokenizer_config.json", settings_), ("generation_config.json", config)):
        write(tokenizer_folder / file, json.dumps(content).encode("utf-8", "surrogatepass"))
    tokenizer = reads_or_refuses(tokenizer_folder)
    if tokenizer is not None:
        assert all(type(token_id) is int and token_id >= 0 for token_id in tokenizer.eos_token_ids)
        tokenizer.encode("he")


@pytest.mark.parametrize("file", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("content", [DEEP, b"\xff\xfe", b"{%" * 1000])
def test_tokenizer_files_that_are_none(tmp_path: Path, file: str, content: bytes) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_bytes(content)
    if content is DEEP and file == "chat_template.jinja":
        HfTokenizer.from_folder(tmp_path)  # brackets are text to a template
    else:
        assert reads_or_refuses(tmp_path) is None


@EFFORT
@given(
    path=st.sampled_from(
        [("model", "vocab", "he"), ("model", "merges"), ("model",), ("added_tokens",), ("added_tokens", 0, "id"),
         ("decoder",), ("pre_tokenizer",), ("normalizer",), ("post_processor",), ("truncation",), ("padding",)]
    ),
    value=oddities,
)  # fmt: skip
@example(path=("model", "vocab", "he"), value=2**32 - 1)
@example(path=("added_tokens", 0, "id"), value=2**32 - 1)
def test_a_tokenizer_json_with_odd_values(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    content = json.loads(byte_level_backend().to_str())
    where = content
    for part in path[:-1]:
        where = where[part]
    where[path[-1]] = value
    write(tmp_path / "tokenizer.json", json.dumps(content).encode("utf-8", "surrogatepass"))
    tokenizer = reads_or_refuses(tmp_path)
    if tokenizer is not None:
        assert tokenizer.vocab_size < 1 << 24


GGML = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "</s>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.pre": "gpt-2",
}


@EFFORT
@given(
    changes=st.dictionaries(
        st.sampled_from(
            [
                *GGML,
                "tokenizer.ggml.add_bos_token",
                "tokenizer.ggml.eot_token_id",
                "tokenizer.chat_template",
                "tokenizer.ggml.scores",
                "tokenizer.ggml.add_space_prefix",
            ]
        ),
        st.one_of(oddities, st.lists(st.sampled_from(["a", "b", "ab", "a b", "", " ", "a  b"]), max_size=6)),
        min_size=1,
        max_size=3,
    ),
    kind=st.sampled_from(["gpt2", "llama"]),
)
def test_gguf_tokenizer_metadata_with_odd_values(changes: dict[str, Any], kind: str) -> None:
    whole = GGML | {"tokenizer.ggml.model": kind, "tokenizer.ggml.scores": [-3.0, -2.0, -1.0, 0.0]}
    made: list[HfTokenizer] = []
    refusal = refusal_of(lambda: made.append(tokenizer_from_metadata(whole | changes, source="m.gguf")))
    assert refusal is None or "m.gguf" in refusal
    for tokenizer in made:
        assert all(0 <= token_id < 1 << 31 for token_id in tokenizer.eos_token_ids)
        tokenizer.encode("ab")


# -- GGUF --------------------------------------------------------------------------------------------------------------


def test_two_tensors_may_not_share_bytes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_weights())
    with GgufFile(path) as file:
        first, second = sorted(file.tensors.values(), key=lambda info: info.start)[:2]
        base = first.start
    content = bytearray(path.read_bytes())
    name = struct.pack("<Q", len(second.name)) + second.name.encode()
    place = content.index(name) + len(name) + 4 + 8 * len(second.shape) + 4
    assert struct.unpack_from("<Q", content, place) == (second.start - base,)
    struct.pack_into("<Q", content, place, first.num_bytes - 32)
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=rf"{path}: tensors .* share bytes"):
        load_gguf(path, torch.float32)


counts = st.sampled_from([struct.pack("<Q", n % 2**64) for n in HUGE])


@EFFORT
@given(place=st.integers(0, 11_000), value=counts, cut=st.one_of(st.none(), st.integers(0, 12_000)))
def test_a_gguf_file_with_a_wrong_length(
    tmp_path_factory: pytest.TempPathFactory, place: int, value: bytes, cut: int | None
) -> None:
    """Eight bytes anywhere in the header become a count, an offset or a length that cannot be."""
    base = tmp_path_factory.getbasetemp() / "right.gguf"
    if not base.exists():
        write_gguf(base, tiny_weights())
    content = bytearray(base.read_bytes())
    content[place : place + 8] = value
    damaged = base.with_name("wrong.gguf")
    damaged.write_bytes(content if cut is None else content[:cut])
    refusal = refusal_of(lambda: load_gguf(damaged, torch.float32))
    assert refusal is None or str(damaged) in refusal
