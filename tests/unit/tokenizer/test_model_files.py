"""Reading a model's folder."""

import json
from pathlib import Path

import pytest

from reprise_core.errors import InvalidInput
from reprise_tokenizer.model_files import load_model_files
from support.models import write_byte_level_model


def _config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_special_tokens_template_and_ends(tmp_path: Path) -> None:
    write_byte_level_model(tmp_path)
    _config(
        tmp_path,
        eos_token={"content": "<|im_end|>"},
        chat_template=[{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}],
    )
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|im_start|>", "eos_token": "x"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    files = load_model_files(tmp_path)
    assert files.chat_template == "D"
    assert files.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    assert files.eos_token_ids == (2, 0)
    assert files.bos_token_id == 1
    assert files.special_ids == {0, 1, 2}


def test_a_template_file_beside_it_wins(tmp_path: Path) -> None:
    write_byte_level_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_model_files(tmp_path).chat_template == "from the file"


def test_a_prompt_is_never_cut_or_filled(tmp_path: Path) -> None:
    write_byte_level_model(tmp_path)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["truncation"] = {
        "max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert len(load_model_files(tmp_path).tokenizer.encode("one two three four").ids) > 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "is no tokenizer"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer_config.json", "{", "is no JSON"),
        ("generation_config.json", "[]", "holds no JSON object"),
    ],
)
def test_damage_is_one_clear_sentence(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    write_byte_level_model(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match=f"model_path: .*{message}"):
        load_model_files(tmp_path)
