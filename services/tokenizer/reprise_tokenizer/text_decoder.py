"""Output tokens to text, token by token.

Invariant of every decoder: the pieces, put together, are the text of all tokens decoded at once, and
no piece ends inside a character.
"""

import codecs
import re
from collections.abc import Iterable
from typing import Any, Protocol

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextDecoder(Protocol):
    def feed(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """No more tokens will come: what is left, with U+FFFD for a broken character."""


class DecoderFactory:
    """Makes decoders for one model's tokenizer; safe to share."""

    def __init__(
        self, tokenizer: Tokenizer, decoder: dict[str, Any] | None, special_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_table = ByteTable(tokenizer) if _is_byte_level(decoder) else None
        self._byte_ids = _byte_token_ids(tokenizer) if _has_byte_fallback(decoder) else frozenset[int]()
        self._special_ids = frozenset(special_ids)
        self._none: frozenset[int] = frozenset()

    def make(self, *, skip_special_tokens: bool, prompt_tail_ids: Iterable[int] = ()) -> TextDecoder:
        skipped = self._special_ids if skip_special_tokens else self._none
        if self._byte_table is not None:
            return ByteLevelDecoder(self._byte_table, skipped)
        return WindowDecoder(self._tokenizer, skipped, self._byte_ids, prompt_tail_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token by itself adds to a text, which may be a part of a character."""
        if self._byte_table is not None:
            return self._byte_table[token_id]
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._byte_ids:
            return bytes([int(token[3:5], 16)])
        # Twice less once: by itself it would lose the space that stands before it within a text.
        once: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice: str = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(once) :] if twice.startswith(once) else once).encode()


class ByteTable:
    """Token id to bytes for byte-level tokenizers, filled as ids come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Empty for an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                return b""
            found = self._bytes[token_id] = _token_bytes(token)
        return found


class ByteLevelDecoder:
    """Each token is a piece of one byte string; text is what of it is whole characters."""

    __slots__ = ("_skipped", "_table", "_utf8")

    def __init__(self, table: ByteTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._table[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class WindowDecoder:
    """For tokenizers where a token's text depends on its neighbours: decode a window, keep what is new.

    The window begins before the last piece given out, so both of its decodings begin alike. A run of
    byte tokens is decoded as a whole, so nothing of it is given out before the token that ends it.
    """

    __slots__ = ("_byte_ids", "_ids", "_read", "_skipped", "_start", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skipped: frozenset[int],
        byte_ids: frozenset[int],
        prompt_tail_ids: Iterable[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._byte_ids = byte_ids
        self._ids = [token_id for token_id in prompt_tail_ids if self._is_text(token_id)]
        # A run that the prompt ends in is the prompt's: the output begins a new one.
        while self._ids and self._ids[-1] in byte_ids:
            self._ids.pop()
        self._start, self._read = 0, len(self._ids)

    def feed(self, token_id: int) -> str:
        if not self._is_text(token_id):
            return ""
        self._ids.append(token_id)
        return "" if token_id in self._byte_ids else self._advance()

    def flush(self) -> str:
        return self._advance()

    def _advance(self) -> str:
        old = self._decode(self._ids[self._start : self._read])
        new = self._decode(self._ids[self._start :])
        if len(new) <= len(old) or not new.startswith(old):
            return ""
        del self._ids[: self._read if old else self._start]
        self._start, self._read = 0, len(self._ids)
        return new[len(old) :]

    def _decode(self, ids: list[int]) -> str:
        # Skipped ids are not in the window; special tokens that are shown must not be dropped here.
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _is_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None


def _byte_chars() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: printable ones stand for themselves,
    the others take the code points from 256 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTE_CHARS = _byte_chars()


def _token_bytes(token: str) -> bytes:
    """A token with any other character is an added one, and stands for its own UTF-8."""
    try:
        return bytes([_BYTE_CHARS[char] for char in token])
    except KeyError:
        return token.encode()


def _parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return list(decoder.get("decoders", ()))
    return [decoder]


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    return [part.get("type") for part in _parts(decoder)] == ["ByteLevel"]


def _has_byte_fallback(decoder: dict[str, Any] | None) -> bool:
    return any(part.get("type") == "ByteFallback" for part in _parts(decoder))


def _byte_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return frozenset(token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))
