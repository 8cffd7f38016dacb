"""Token bytes. Owns: how the text of one vocabulary entry becomes the bytes it stands for.

Text is made from bytes, not from strings: a token may hold half a character, so only the joined bytes of all tokens
have a meaning as UTF-8. Every tokenizer of this package therefore reduces to one table, id -> bytes, and a decode is
`b"".join(table[i] for i in ids)` read as UTF-8 with U+FFFD for what is not.
"""

from __future__ import annotations

import re
from typing import Final

from engine.errors import ModelFormatError

_BYTE_FALLBACK: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Printable characters that stand for themselves in a byte-level vocabulary, as (first, last).
_PLAIN_RANGES: Final = ((0x21, 0x7E), (0xA1, 0xAC), (0xAE, 0xFF))


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of a byte-level BPE vocabulary: 256 entries.

    Printable Latin-1 characters are themselves; the other bytes, in order, are U+0100, U+0101, ...
    """
    plain = {byte for first, last in _PLAIN_RANGES for byte in range(first, last + 1)}
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(b for b in range(256) if b not in plain)})
    return alphabet


_ALPHABET: Final = byte_alphabet()


def byte_level(token: str) -> bytes:
    """Bytes of a byte-level BPE entry; an entry with a foreign character stands for its own UTF-8."""
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def sentencepiece(token: str) -> bytes:
    """Bytes of a SentencePiece-style entry: U+2581 is a space, <0xNN> is one byte."""
    if match := _BYTE_FALLBACK.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode()


def scheme_of(decoder: object) -> str:
    """`byte_level` or `sentencepiece`, from the `decoder` entry of a tokenizer.json.

    Raises ModelFormatError for a decoder that is not a concatenation of bytes (WordPiece, CTC, ...).
    """
    kinds = set(_decoder_types(decoder))
    if kinds == {"ByteLevel"}:
        return "byte_level"
    if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return "sentencepiece"
    raise ModelFormatError(
        f"tokenizer.json: decoder={sorted(kinds) or None} is not supported; "
        "supported are ByteLevel and the SentencePiece chain (Replace, ByteFallback, Fuse, Strip, Metaspace)"
    )


def _decoder_types(decoder: object) -> list[str]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [kind for part in decoder.get("decoders", ()) for kind in _decoder_types(part)]
    return [str(decoder.get("type"))]
