"""The setting that names adapters: the reference's two forms, and what is wrong with others."""

import pytest
from pydantic import ValidationError

from reprise_worker.lora_modules import MAX_ADAPTERS, LoraModule
from reprise_worker.settings import WorkerSettings


def adapters(text: str) -> tuple[LoraModule, ...]:
    return WorkerSettings(model_path="x", lora_modules=text).adapters


@pytest.mark.parametrize(
    "text",
    [
        "sql=/a/sql,chat=/a=b/chat",
        " sql = /a/sql , chat=/a=b/chat ,",
        '[{"name": "sql", "path": "/a/sql"}, {"path": "/a=b/chat", "name": "chat"}]',
        '["sql=/a/sql", {"name": "chat", "path": "/a=b/chat"}]',
    ],
)
def test_both_forms_in_their_order(text: str) -> None:
    assert adapters(text) == (("sql", "/a/sql"), ("chat", "/a=b/chat"))


def test_none_and_one_object() -> None:
    assert adapters("") == adapters("[]") == ()
    assert adapters('{"name": "a,b", "path": "p"}') == (("a,b", "p"),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sql", "'sql', must have the form NAME=PATH"),
        ("=path", "name '', must be 1 to 256 printable characters"),
        ("sql=", "path of 'sql': '', must name a folder"),
        ("a\nb=/p", "printable"),
        (f"{'n' * 257}=/p", "must be 1 to 256"),
        ("sql=/a,sql=/b", "the name 'sql' is given twice"),
        ("[1]", "1, must be an object with name and path"),
        ('[{"name": "sql"}]', "must be an object with name and path"),
        ('[{"name": "sql", "path": "/a", "base_model_name": "x"}]', "and nothing else"),
        ('[{"name": "sql", "path": 1}]', "path of 'sql': 1, must name a folder"),
        ("[", "is not JSON"),
        (",".join(f"a{number}=/p" for number in range(MAX_ADAPTERS + 1)), "65 adapters, at most 64"),
    ],
)
def test_what_is_wrong_stops_the_start(text: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        adapters(text)


def test_the_environment_has_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRISE_WORKER_MODEL_PATH", "x")
    monkeypatch.setenv("REPRISE_WORKER_LORA_MODULES", "sql=/a/sql")
    monkeypatch.setenv("REPRISE_WORKER_MAX_LORA_RANK", "64")
    settings = WorkerSettings()
    assert settings.adapters == (("sql", "/a/sql"),)
    assert settings.max_lora_rank == 64
