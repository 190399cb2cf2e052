"""Incremental text: the pieces together are the whole, and none ends inside a character."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from reprise_tokenizer.model_files import ModelFiles, load_model_files
from reprise_tokenizer.text_decoder import ByteLevelDecoder, DecoderFactory, WindowDecoder
from support.models import write_byte_fallback_model, write_byte_level_model


@cache
def _files(kind: str) -> ModelFiles:
    with TemporaryDirectory() as folder:
        write = write_byte_level_model if kind == "byte_level" else write_byte_fallback_model
        return load_model_files(write(Path(folder)))


def _factory(files: ModelFiles) -> DecoderFactory:
    return DecoderFactory(files.tokenizer, files.decoder, files.special_ids)


def _stream(files: ModelFiles, ids: list[int], *, skip: bool, tail: list[int] | None = None) -> list[str]:
    decoder = _factory(files).make(skip_special_tokens=skip, prompt_tail_ids=tail or [])
    return [*(decoder.feed(one) for one in ids), decoder.flush()]


def _bytes_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


KINDS = pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])


def test_each_family_has_its_decoder() -> None:
    assert isinstance(_factory(_files("byte_level")).make(skip_special_tokens=True), ByteLevelDecoder)
    assert isinstance(_factory(_files("byte_fallback")).make(skip_special_tokens=True), WindowDecoder)


@KINDS
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_random_tokens(kind: str, data: st.DataObject) -> None:
    files = _files(kind)
    size = files.tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size + 3), max_size=40))
    skip = data.draw(st.booleans())
    pieces = _stream(files, ids, skip=skip)
    assert "".join(pieces) == files.tokenizer.decode(ids, skip_special_tokens=skip)


@KINDS
@given(text=st.text(max_size=30))
@example(text="👩‍👩‍👧‍👦 🏳️‍🌈 é")
@example(text="北京�end")
@example(text="  two  spaces ")
@settings(max_examples=200, deadline=None)
def test_real_text_comes_back_in_whole_characters(kind: str, text: str) -> None:
    files = _files(kind)
    ids = files.tokenizer.encode(text).ids
    pieces = _stream(files, ids, skip=False)
    assert "".join(pieces) == files.tokenizer.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in "".join(pieces):
        for piece in pieces:
            assert piece.encode().decode() == piece


def test_an_emoji_comes_as_soon_as_it_is_whole() -> None:
    files = _files("byte_level")
    ids = [files.tokenizer.token_to_id(token) for token in ("ð", "Ł", "Ļ", "Ĥ")]
    assert "".join(_stream(files, ids, skip=True)) == "🙂"
    assert _stream(files, ids, skip=True)[:4] == ["", "", "", "🙂"]


def test_a_run_of_byte_tokens_is_decoded_as_a_whole() -> None:
    files = _files("byte_fallback")
    ids = [*_bytes_ids(files.tokenizer, "🙂"), files.tokenizer.token_to_id("▁quiet")]
    assert _stream(files, ids, skip=True) == ["", "", "", "", "🙂 quiet", ""]
    broken = [*ids[:2], *ids[4:]]
    assert "".join(_stream(files, broken, skip=True)) == files.tokenizer.decode(broken)


def test_the_first_word_keeps_its_space_after_a_prompt() -> None:
    files = _files("byte_fallback")
    the, quiet = (files.tokenizer.token_to_id(token) for token in ("▁the", "▁quiet"))
    assert "".join(_stream(files, [quiet], skip=True)) == "quiet"
    assert "".join(_stream(files, [quiet, the], skip=True, tail=[the])) == " quiet the"


def test_special_tokens_are_skipped_or_shown() -> None:
    files = _files("byte_level")
    ids = files.tokenizer.encode("<|im_start|>hi<|im_end|>").ids
    assert "".join(_stream(files, ids, skip=True)) == "hi"
    assert "".join(_stream(files, ids, skip=False)) == "<|im_start|>hi<|im_end|>"


def test_an_added_token_with_other_characters_stands_for_itself(tmp_path: Path) -> None:
    folder = write_byte_level_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["<mark 北>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = load_model_files(folder)
    ids = files.tokenizer.encode("a<mark 北>b").ids
    assert "".join(_stream(files, ids, skip=False)) == files.tokenizer.decode(ids) == "a<mark 北>b"
    assert json.loads((folder / "tokenizer.json").read_text())["decoder"]["type"] == "ByteLevel"
