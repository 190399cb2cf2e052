"""Log-probabilities as clients get them: gateway, real tokenizer, an engine whose values are known."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from reprise_core.logprobs import TokenLogprobs
from support.fake_engine import FakeEngine, best_of_neighbours
from support.gateway_system import GatewaySystem, gateway_system
from support.models import write_byte_level_model
from support.waiting import until

TEXT = "The river there is quiet, été 日本 🙂!"
PROMPT = "One two three é"
EOS = 2


class Story:
    """The engine says a fixed text and then the end token."""

    def __init__(self, system: GatewaySystem, engine: FakeEngine, tokenizer: Tokenizer) -> None:
        self.system = system
        self.http = system.http
        self.engine = engine
        self.tokenizer = tokenizer
        self.ids: list[int] = [*tokenizer.encode(TEXT).ids, EOS]
        self.prompt: list[int] = tokenizer.encode(PROMPT).ids
        engine.script = lambda token_ids, index: self.ids[index]

    async def post(self, path: str, status: int = 200, **fields: Any) -> Any:
        kind = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
        response = await self.http.post(path, json={**kind, "max_tokens": 200, **fields})
        assert response.status_code == status, response.text
        if not fields.get("stream"):
            return response.json()
        datas = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        return [json.loads(data) for data in datas[:-1]]

    async def complete(self, **fields: Any) -> Any:
        return (await self.post("/v1/completions", **fields))["choices"][0]

    async def chat(self, **fields: Any) -> Any:
        return (await self.post("/v1/chat/completions", **fields))["choices"][0]

    def text_of(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


@pytest_asyncio.fixture
async def story(tmp_path: Path) -> AsyncIterator[Story]:
    model = write_byte_level_model(tmp_path)
    engine = FakeEngine(vocab_size=400, max_model_len=300, block_size=4, eos_token_ids=(EOS,))
    async with gateway_system(model, [engine]) as system:
        yield Story(system, engine, Tokenizer.from_file(str(model / "tokenizer.json")))


async def test_a_completion_says_where_each_token_begins_and_how_probable_it_was(story: Story) -> None:
    choice = await story.complete(logprobs=2)
    shown = choice["logprobs"]
    assert list(shown) == ["text_offset", "token_logprobs", "tokens", "top_logprobs"]
    assert shown["tokens"] == [story.text_of(token_id) for token_id in story.ids]
    rows = [best_of_neighbours(len(story.prompt) + i, one, 2) for i, one in enumerate(story.ids)]
    assert shown["token_logprobs"] == [row.logprob for row in rows]
    for row, top in zip(rows, shown["top_logprobs"], strict=True):
        # Two parts of characters have the same text; the more probable one is shown.
        expected = {story.text_of(row.top_ids[1]): row.top_logprobs[1]}
        assert top == {**expected, story.text_of(row.top_ids[0]): row.top_logprobs[0]}
    for offset, token in zip(shown["text_offset"], shown["tokens"], strict=True):
        if "\ufffd" not in token:
            assert (choice["text"] + "<|im_end|>")[offset:].startswith(token)
    assert choice["prompt_logprobs"] is None


async def test_a_token_that_is_not_among_the_best_stands_beside_them(story: Story) -> None:
    story.engine.logprobs = lambda position, token, num_top: TokenLogprobs(
        -7.5, 40, tuple(range(300, 300 + num_top)), tuple(-1.0 - i for i in range(num_top))
    )
    for num_top in (0, 3):
        choice = await story.complete(logprobs=num_top, max_tokens=1)
        first, *others = choice["logprobs"]["top_logprobs"][0].items()
        assert first == (story.text_of(story.ids[0]), -7.5)
        assert [value for _, value in others] == [-1.0, -2.0, -3.0][:num_top]
        entry = (await story.chat(logprobs=True, top_logprobs=num_top, max_tokens=1))["logprobs"]["content"][
            0
        ]
        assert entry["logprob"] == -7.5
        assert [one["logprob"] for one in entry["top_logprobs"]] == [-1.0, -2.0, -3.0][:num_top]


async def test_minus_infinity_is_a_number_in_json(story: Story) -> None:
    story.engine.logprobs = lambda position, token, num_top: TokenLogprobs(
        float("-inf"), 400, (5,), (float("-inf"),)
    )
    entry = (await story.chat(logprobs=True, top_logprobs=1, max_tokens=1))["logprobs"]["content"][0]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


async def test_the_bytes_of_a_chats_tokens_are_its_text_also_where_characters_are_cut(story: Story) -> None:
    choice = await story.chat(logprobs=True, top_logprobs=1)
    content = choice["logprobs"]["content"]
    assert [list(entry) for entry in content] == [["token", "logprob", "bytes", "top_logprobs"]] * len(
        story.ids
    )
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == TEXT
    assert any(entry["token"] == "\ufffd" and entry["bytes"][0] > 127 for entry in content)
    for entry in content:
        assert entry["top_logprobs"] == [{name: entry[name] for name in ("token", "logprob", "bytes")}]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("per_message", [1, 3])
async def test_a_streams_pieces_are_the_whole(story: Story, path: str, per_message: int) -> None:
    story.engine.tokens_per_message = per_message
    asked = {"logprobs": 1} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 1}
    # Held back text holds back its tokens' log-probabilities.
    asked["stop"] = ["quiet, no"]
    whole = (await story.post(path, **asked))["choices"][0]["logprobs"]
    story.engine.token_interval_s = 0.002
    chunks = await story.post(path, stream=True, return_token_ids=True, **asked)
    joined: dict[str, list[Any]] = {name: [] for name in whole}
    num_pieces = 0
    for chunk in chunks:
        choice = chunk["choices"][0]
        if choice.get("token_ids"):
            num_pieces += 1
            assert len(next(iter(choice["logprobs"].values()))) == len(choice["token_ids"])
        for name, values in (choice["logprobs"] or {}).items():
            joined[name] += values
    assert joined == whole
    assert num_pieces > 3


async def test_a_prompt_by_token_id(story: Story) -> None:
    choice = await story.complete(prompt_logprobs=2)
    chat = await story.post("/v1/chat/completions", prompt_logprobs=0, return_token_ids=True)
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(story.prompt) - 1
    for i, (token_id, shown) in enumerate(zip(story.prompt[1:], rest, strict=True), start=1):
        row = best_of_neighbours(i, token_id, 2)
        assert list(shown) == [str(token_id), str(token_id + 1)]
        assert shown[str(token_id)] == {
            "logprob": row.logprob,
            "rank": 1,
            "decoded_token": story.text_of(token_id),
        }
        assert shown[str(token_id + 1)]["rank"] == 2
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in chat["choices"][0]
    assert [one and list(one) for one in chat["prompt_logprobs"]] == [
        None,
        *([str(token_id)] for token_id in chat["prompt_token_ids"][1:]),
    ]


async def test_an_echoed_prompt_comes_first_and_is_cut_to_what_each_list_asked_for(story: Story) -> None:
    choice = await story.complete(echo=True, logprobs=1, prompt_logprobs=3)
    shown = choice["logprobs"]
    assert choice["text"] == PROMPT + TEXT
    assert shown["tokens"] == [story.text_of(token_id) for token_id in [*story.prompt, *story.ids]]
    assert (shown["token_logprobs"][0], shown["top_logprobs"][0], shown["text_offset"][0]) == (None, None, 0)
    assert all(len(top) == 1 for top in shown["top_logprobs"][1:])
    assert all(len(one) == 3 for one in choice["prompt_logprobs"][1:])
    assert shown["text_offset"][len(story.prompt)] == len(PROMPT)


async def test_of_several_answers_the_prompt_is_measured_once(story: Story) -> None:
    answer = await story.post(
        "/v1/completions", prompt=["One", PROMPT], n=2, temperature=1, prompt_logprobs=1, logprobs=0
    )
    asked = [submit.sampling.HasField("prompt_logprobs") for submit in story.engine.submits]
    assert asked == [True, False, True, False]
    shown = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert shown[0] == shown[1] != shown[2] == shown[3]
    assert len(shown[2]) == len(story.prompt)
    assert all(len(choice["logprobs"]["tokens"]) == len(story.ids) for choice in answer["choices"])


async def test_token_ids_for_texts(story: Story) -> None:
    choice = await story.complete(logprobs=1, max_tokens=2, return_tokens_as_token_ids=True)
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in story.ids[:2]]
    assert list(choice["logprobs"]["top_logprobs"][0]) == [f"token_id:{story.ids[0]}"]


async def test_the_tokenizer_is_asked_for_each_token_once(story: Story) -> None:
    for _ in range(2):
        await story.complete(logprobs=2)
    name, labels = "reprise_tokenizer_call_seconds_count", {"call": "token_bytes"}
    assert story.system.tokenizer.registry.get_sample_value(name, labels) == 1


@pytest.mark.parametrize("forget", [False, True], ids=["stream broke", "engine lost it"])
async def test_values_go_on_where_they_were_after_a_loss(story: Story, forget: bool) -> None:
    whole = await story.complete(logprobs=1, prompt_logprobs=1)
    story.engine.token_interval_s = 0.01
    asking = asyncio.ensure_future(story.complete(logprobs=1, prompt_logprobs=1))
    try:
        await until(lambda: len(story.engine.submits) == 2)
        request = story.engine.requests[story.engine.submits[-1].request_id]
        await until(lambda: len(request.output_ids) > 8)
        story.engine.forget_requests() if forget else story.engine.break_streams()
        assert await asking == whole
    finally:
        asking.cancel()
    if forget:
        last = story.engine.submits[-1]
        assert last.num_output_tokens
        assert not last.sampling.HasField("prompt_logprobs")


async def test_an_engine_that_gives_none_is_the_engines_fault(story: Story) -> None:
    story.engine.logprobs = None
    error = (await story.post("/v1/completions", status=502, logprobs=1))["error"]
    assert "0 bytes of log-probabilities" in error["message"]
    assert "error" in (await story.post("/v1/completions", stream=True, logprobs=1))[-1]
    assert (await story.complete())["text"] == TEXT


async def test_the_openai_client_reads_them(story: Story) -> None:
    client = AsyncOpenAI(base_url=f"{story.http.base_url}/v1", api_key="none", max_retries=0)
    chat = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": PROMPT}],
        logprobs=True,
        top_logprobs=2,
        max_tokens=3,
    )
    content = chat.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
    assert bytes(content[0].bytes).decode() == content[0].token
    text = await client.completions.create(model="smollm2", prompt=PROMPT, logprobs=2, max_tokens=3)
    assert len(text.choices[0].logprobs.token_logprobs) == 3
    await client.close()
