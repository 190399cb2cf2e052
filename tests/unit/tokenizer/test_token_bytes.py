"""What single tokens add to a text: parts of characters, spaces, special tokens."""

from pathlib import Path

import pytest

from reprise_tokenizer.model_files import ModelFiles, load_model_files
from reprise_tokenizer.text_decoder import DecoderFactory
from support.models import write_byte_fallback_model, write_byte_level_model

TEXT = "The river there is quiet, été 日本 🙂 ok"


@pytest.fixture
def byte_level(tmp_path: Path) -> ModelFiles:
    return load_model_files(write_byte_level_model(tmp_path))


@pytest.fixture
def byte_fallback(tmp_path: Path) -> ModelFiles:
    return load_model_files(write_byte_fallback_model(tmp_path))


def factory(files: ModelFiles) -> DecoderFactory:
    return DecoderFactory(files.tokenizer, files.decoder, files.special_ids)


def test_byte_level_tokens_together_are_the_text(byte_level: ModelFiles) -> None:
    tokens = [factory(byte_level).token_bytes(one) for one in byte_level.tokenizer.encode(TEXT).ids]
    assert b"".join(tokens).decode() == TEXT
    assert any(token.decode(errors="replace") == "\ufffd" for token in tokens)


def test_special_tokens_have_their_names(byte_level: ModelFiles, byte_fallback: ModelFiles) -> None:
    assert factory(byte_level).token_bytes(2) == b"<|im_end|>"
    assert factory(byte_fallback).token_bytes(2) == b"</s>"


def test_ids_outside_the_vocabulary_have_none(byte_level: ModelFiles, byte_fallback: ModelFiles) -> None:
    for files in (byte_level, byte_fallback):
        assert factory(files).token_bytes(files.tokenizer.get_vocab_size() + 5) == b""


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("▁the", b" the"),
        ("quiet", b"quiet"),
        ("▁", b" "),
        ("▁▁", b"  "),
        ("é", "é".encode()),
        ("<0xE2>", b"\xe2"),
    ],
)
def test_word_marks_are_spaces_and_byte_tokens_are_bytes(
    byte_fallback: ModelFiles, token: str, expected: bytes
) -> None:
    token_id = byte_fallback.tokenizer.token_to_id(token)
    assert factory(byte_fallback).token_bytes(token_id) == expected
