"""Gateway, real tokenizer, fake engine: what clients get, plain and streamed."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError
from tokenizers import Tokenizer

from support.fake_engine import FakeEngine
from support.gateway_system import GatewaySystem, gateway_system
from support.models import write_byte_level_model
from support.waiting import until

ENGLISH = "One two three four five six seven eight nine ten. The river there is quiet, été 🙂!"
EOS = 2


class Story:
    """A system whose engine says a fixed text, token by token, and then the end token."""

    def __init__(self, system: GatewaySystem, tokenizer: Tokenizer) -> None:
        self.system = system
        self.http = system.http
        self.engine = system.engines[0]
        self.ids: list[int] = tokenizer.encode(ENGLISH).ids
        self.tokenizer = tokenizer
        self.engine.script = lambda token_ids, index: self.ids[index] if index < len(self.ids) else EOS

    async def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"prompt": "say it", "max_tokens": 200, **fields}
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(self, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
        body = {"max_tokens": 200, "stream": True, **fields}
        if path == "/v1/completions":
            body.setdefault("prompt", "say it")
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        datas = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert datas[-1] == "[DONE]"
        return [json.loads(data) for data in datas[:-1]]


@pytest_asyncio.fixture
async def story(tmp_path: Path) -> AsyncIterator[Story]:
    model = write_byte_level_model(tmp_path)
    engine = FakeEngine(vocab_size=400, max_model_len=300, block_size=4)
    async with gateway_system(model, [engine]) as system:
        yield Story(system, Tokenizer.from_file(str(model / "tokenizer.json")))


async def test_a_text_to_its_end(story: Story) -> None:
    answer = await story.complete()
    choice = answer["choices"][0]
    assert choice["text"] == ENGLISH
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert answer["usage"]["completion_tokens"] == len(story.ids) + 1
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + len(story.ids) + 1


async def test_streamed_text_is_the_plain_one_in_whole_characters(story: Story) -> None:
    story.engine.token_interval_s = 0.002
    chunks = await story.stream()
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(pieces) == ENGLISH
    assert len(pieces) > 10
    assert all("\ufffd" not in piece for piece in pieces)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]


async def test_length(story: Story) -> None:
    answer = await story.complete(max_tokens=5)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == story.tokenizer.decode(story.ids[:5])


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_request_at_its_token(story: Story, include: bool) -> None:
    story.engine.token_interval_s = 0.002
    answer = await story.complete(stop=["never", "six"], include_stop_str_in_output=include)
    choice = answer["choices"][0]
    assert choice["text"] == ENGLISH[: ENGLISH.index("six") + (3 if include else 0)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "six")
    num_tokens = answer["usage"]["completion_tokens"]
    assert "six" in story.tokenizer.decode(story.ids[:num_tokens])
    assert "six" not in story.tokenizer.decode(story.ids[: num_tokens - 1])
    await until(lambda: bool(story.engine.finishes))
    assert story.engine.finishes[0].num_output_tokens == num_tokens
    assert story.engine.requests == {}
    chunks = await story.stream(stop="six", include_stop_str_in_output=include)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["choices"][0]["stop_reason"] == "six"


async def test_a_stop_token_of_the_callers(story: Story) -> None:
    stop_id = story.ids[6]
    num_tokens = story.ids.index(stop_id) + 1
    answer = await story.complete(stop_token_ids=[stop_id], return_token_ids=True)
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_id)
    assert choice["text"] == story.tokenizer.decode(story.ids[: num_tokens - 1])
    assert choice["token_ids"] == story.ids[:num_tokens]
    assert answer["usage"]["completion_tokens"] == num_tokens


async def test_ignore_eos_and_special_tokens(story: Story) -> None:
    story.engine.script = lambda token_ids, index: EOS if index % 2 else story.ids[index]
    answer = await story.complete(max_tokens=4, ignore_eos=True, skip_special_tokens=False)
    shown = story.tokenizer.decode([story.ids[0], EOS, story.ids[2], EOS], skip_special_tokens=False)
    assert answer["choices"][0]["text"] == shown
    assert "<|im_end|>" in shown
    assert (await story.complete(max_tokens=4))["usage"]["completion_tokens"] == 2


async def test_cached_tokens_follow_the_hashes_and_the_salt(story: Story) -> None:
    prompt = story.ids[:18]

    async def cached(**fields: Any) -> Any:
        usage = (await story.complete(prompt=prompt, max_tokens=1, **fields))["usage"]
        return usage["prompt_tokens_details"]

    assert (await cached())["cached_tokens"] == 0
    details = await cached()
    assert details["cached_tokens"] == details["local_cached_tokens"] == 16
    assert details["external_cached_tokens"] == 0
    assert details["cached_by_source"] == {"device": 16, "host": 0, "disk": 0, "external": 0}
    assert (await cached(cache_salt="a"))["cached_tokens"] == 0
    assert (await cached(cache_salt="a"))["cached_tokens"] == 16
    chunks = await story.stream(prompt=prompt, max_tokens=1, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


async def test_what_the_engine_is_given(story: Story) -> None:
    await story.complete(
        prompt=[5, 6, 7], max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, seed=11, min_tokens=2,
        cache_salt="salt", priority=-3, stop_token_ids=[9],
    )  # fmt: skip
    submit = story.engine.submits[-1]
    assert list(submit.token_ids) == [5, 6, 7]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 11)
    assert (sampling.max_tokens, sampling.min_tokens, list(sampling.stop_token_ids)) == (3, 2, [9])
    assert (submit.cache_salt, submit.priority, submit.block_hashes.profile_id) == (
        "salt",
        -3,
        "fake-profile",
    )


async def test_chat_uses_the_room_that_is_left(story: Story) -> None:
    story.engine.script = lambda token_ids, index: story.ids[0]
    body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    answer = (await story.http.post("/v1/chat/completions", json=body)).json()
    assert answer["usage"]["total_tokens"] == 300
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_lists_of_prompts_and_n(story: Story) -> None:
    answer = await story.complete(prompt=["one", "two"], n=2, seed=5, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 8
    prompts = [list(submit.token_ids) for submit in story.engine.submits]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert answer["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])
    assert [submit.sampling.seed for submit in story.engine.submits] == [5, 6, 5, 6]
    chunks = await story.stream(prompt=["one", "two"], max_tokens=2)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [story.tokenizer.decode(story.ids[:2])] * 2


async def test_echo(story: Story) -> None:
    for prompt in ("One two", story.tokenizer.encode("One two").ids):
        answer = await story.complete(prompt=prompt, echo=True, max_tokens=2)
        assert answer["choices"][0]["text"] == "One two" + story.tokenizer.decode(story.ids[:2])


async def test_continuous_usage(story: Story) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await story.stream(max_tokens=6, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 6


async def test_many_at_once_do_not_mix(story: Story) -> None:
    story.engine.script = lambda token_ids, index: 10 + (sum(token_ids[:2]) + index) % 300
    story.engine.token_interval_s = 0.001

    async def one(i: int) -> None:
        answer = await story.complete(prompt=[10 + i, 20], max_tokens=30, return_token_ids=True)
        expected = [10 + (30 + i + index) % 300 for index in range(30)]
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["choices"][0]["text"] == story.tokenizer.decode(expected)

    await asyncio.gather(*(one(i) for i in range(40)))


async def test_the_openai_client(story: Story) -> None:
    client = AsyncOpenAI(base_url=f"{story.http.base_url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = await client.chat.completions.create(model="smollm2", messages=messages)
    assert answer.choices[0].message.content == ENGLISH
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    text, usage = "", None
    stream = await client.chat.completions.create(
        model="smollm2", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        usage = chunk.usage
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    assert text == ENGLISH
    assert usage is not None
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(model="smollm2", messages=messages, logit_bias={"5": 1})
    assert caught.value.param == "logit_bias"
    assert [model.id async for model in client.models.list()] == ["smollm2"]
    await client.close()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (
            [{"role": "robot", "content": "hi"}],
            "messages: the chat template refuses them: unknown role robot",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x" * 2000}], "the context length is 300 tokens"),
    ],
)
async def test_bad_messages_are_refused_beside_a_running_request(
    story: Story, messages: Any, message: str
) -> None:
    story.engine.token_interval_s = 0.005
    running = asyncio.ensure_future(story.complete())
    await until(lambda: bool(story.engine.requests))
    response = await story.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert (await running)["choices"][0]["text"] == ENGLISH
