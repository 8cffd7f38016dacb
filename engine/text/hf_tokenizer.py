"""Tokenizers on the `tokenizers` library. Owns: ids from text by that library, text from ids by our byte table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from engine.errors import ModelFormatError
from engine.models.json_file import read_json_object
from engine.text import token_bytes as tb
from engine.text.chat_template import PLAIN_TEMPLATE, ChatTemplate, ChatTemplateError
from engine.text.tokenizer import decode_with

#: Ids are below this: several times the largest vocabulary in use. The table of their bytes is as long as the largest.
MAX_VOCABULARY: Final = 1 << 22


class HfTokenizer:
    """A `tokenizers.Tokenizer` with a chat template and a table of token bytes."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int],
        bos_token_id: int | None,
        prefix_ids: Sequence[int] = (),
        chat_template: str | None = None,
        source: str = "tokenizer",
    ) -> None:
        """`prefix_ids` stand before a bare text (beside what the backend's post-processor adds)."""
        self._backend = backend
        self._prefix = list(prefix_ids)
        self._eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._bos_token_id = bos_token_id
        vocabulary = _vocabulary(backend, source)  # before anything whose cost grows with the largest id
        description = json.loads(backend.to_str())
        try:
            self._scheme = tb.scheme_of(description.get("decoder"))
        except ModelFormatError as error:
            raise ModelFormatError(f"{source}: {error}") from None
        self._strips = self._scheme == "sentencepiece"
        self._table = _bytes_table(backend, vocabulary, self._scheme)
        try:
            self._template = ChatTemplate(
                chat_template or PLAIN_TEMPLATE,
                bos_token=self._text_of(bos_token_id),
                eos_token=self._text_of(self._eos_token_ids[0] if self._eos_token_ids else None),
            )
        except ChatTemplateError as error:
            raise ModelFormatError(f"{source}: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path) -> HfTokenizer:
        """From tokenizer.json, tokenizer_config.json, generation_config.json and config.json of a model folder."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelFormatError(f"{path}: no such file; a fast tokenizer (tokenizer.json) is needed")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except BaseException as error:  # the library's Rust code panics with one, for some malformed files
            if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
                raise
            raise ModelFormatError(f"{path}: {str(error)[:500]}") from error
        # A model folder may ask for truncation or padding; a server decides lengths itself.
        backend.no_truncation()
        backend.no_padding()
        settings = _read_json(folder / "tokenizer_config.json")
        bos = backend.token_to_id(_token_text(settings.get("bos_token")) or "")
        return cls(
            backend,
            eos_token_ids=_eos_ids(folder, backend, settings),
            bos_token_id=bos,
            chat_template=_chat_template(folder, settings),
            source=str(folder),
        )

    @property
    def vocab_size(self) -> int:
        return len(self._table)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    @property
    def bos_token_id(self) -> int | None:
        return self._bos_token_id

    @property
    def strips_first_space(self) -> bool:
        return self._strips

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special).ids
        return self._prefix + ids if add_special and self._prefix else ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id] if 0 <= token_id < len(self._table) else b""

    def decode(self, ids: Sequence[int], *, continues: bool = False) -> str:
        return decode_with(self, ids, continues)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self._template.render(messages)

    def _text_of(self, token_id: int | None) -> str:
        return "" if token_id is None else (self._backend.id_to_token(token_id) or "")


def _vocabulary(backend: tokenizers.Tokenizer, source: str) -> dict[str, int]:
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    largest = max(vocabulary.values(), default=-1)
    if largest >= MAX_VOCABULARY:
        raise ModelFormatError(f"{source}: a token has id {largest}; at most {MAX_VOCABULARY - 1} is possible here")
    return vocabulary


def _bytes_table(backend: tokenizers.Tokenizer, vocabulary: dict[str, int], scheme: str) -> list[bytes]:
    """Bytes of each id, 0 to the largest; holes and special tokens are b""."""
    convert = tb.byte_level if scheme == "byte_level" else tb.sentencepiece
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = convert(token)
    for token_id, added in backend.get_added_tokens_decoder().items():
        table[token_id] = b"" if added.special else added.content.encode()
    return table


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _token_text(entry: object) -> str | None:
    """Tokens are written as a string or as an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> list[int]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        entry = _read_json(folder / name).get("eos_token_id")
        listed = entry if isinstance(entry, list) else [entry]
        ids += [i for i in listed if type(i) is int and 0 <= i < MAX_VOCABULARY]
    own = backend.token_to_id(_token_text(settings.get("eos_token")) or "")
    return ids if own is None else [own, *ids]


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFormatError(f"{file}: cannot be read as text: {error}") from error
    entry = settings.get("chat_template")
    if isinstance(entry, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None
