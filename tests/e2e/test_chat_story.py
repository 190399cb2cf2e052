"""A user's story: two turns of a chat, whose second reuses the first, with the right text always."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from openai import OpenAI

from support.reference import reference
from support.system import BLOCK_SIZE, System
from support.waiting import until_blocking

SYSTEM_PROMPT = (
    "You are a patient teacher of geography. Answer in short sentences, give one example for each claim,"
    " and never invent a place. When you are not sure, say so and suggest where to look it up."
)
FIRST = {"role": "user", "content": "Why do rivers bend?"}
MAX_TOKENS = 24
LOGPROB_TOLERANCE = 5e-3
"""Nats, in float32: sums over the context are rounded differently where it is computed in blocks."""


@pytest.fixture(scope="module")
def client(system: System) -> OpenAI:
    return OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def empty(system: System) -> None:
    """No tier has anything; in Redis what a reset leaves behind is swept away."""
    assert system.reset(external=True, running=True)["success"]
    until_blocking(lambda: not block_keys(system))


def block_keys(system: System) -> set[bytes]:
    with redis.Redis.from_url(system.endpoints["redis"]) as client:
        return set(client.scan_iter("reprise:*:*:*:*:*:*"))


def messages_of(*turns: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, *turns]


def ask(system: System, messages: list[dict[str, str]], **more: object) -> tuple[list[int], list[int], dict]:
    """Prompt ids, output ids and usage of a greedy answer."""
    body = {
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        **more,
    }
    status, answer = system.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"], answer["usage"]


def cached(usage: dict) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_the_second_turn_reuses_the_first(system: System, client: OpenAI, stream: bool) -> None:
    model = client.models.list().data[0].id
    messages = messages_of(FIRST)

    def turn() -> tuple[str, object]:
        arguments = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
        if not stream:
            answer = client.chat.completions.create(**arguments)
            return answer.choices[0].message.content, answer.usage
        text, usage = "", None
        chunks = client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
        for chunk in chunks:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return text, usage

    text, usage = turn()
    first_prompt = system.token_ids({"messages": messages})
    assert usage.prompt_tokens == len(first_prompt)
    assert usage.prompt_tokens_details.cached_tokens == 0
    right = reference().generate(first_prompt, MAX_TOKENS)
    computed = first_prompt + right[:-1]  # the last token's KV is never computed
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Name one such river."}]
    second_prompt = system.token_ids({"messages": messages})
    text, usage = turn()
    shared = next(i for i, (a, b) in enumerate(zip([*computed, None], second_prompt, strict=False)) if a != b)
    assert shared > len(first_prompt) - 8
    assert usage.prompt_tokens_details.cached_tokens == shared // BLOCK_SIZE * BLOCK_SIZE > 0
    assert text == decode(system, reference().generate(second_prompt, MAX_TOKENS))


def decode(system: System, ids: list[int]) -> str:
    """Special tokens are left out, as in an answer."""
    eos = reference().eos
    kept = [token for token in ids if token != eos]
    status, answer = system.post("/detokenize", {"tokens": kept})
    assert status == 200, answer
    return answer["prompt"]


@pytest.mark.usefixtures("empty")
def test_the_text_is_the_same_from_an_empty_a_warm_and_a_reloaded_cache(system: System) -> None:
    messages = messages_of(FIRST)
    prompt, output, usage = ask(system, messages, ignore_eos=True)
    assert cached(usage) == 0
    reference().check_greedy(prompt, output)
    most = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    _, warm, usage = ask(system, messages, ignore_eos=True)
    assert (warm, cached(usage)) == (output, most)
    assert usage["prompt_tokens_details"]["cached_by_source"]["device"] == most

    wait_until_saved(system, (len(prompt) + MAX_TOKENS - 1) // BLOCK_SIZE)
    hits = system.metric("vllm:external_prefix_cache_hits_total")
    assert system.reset()["success"]
    _, reloaded, usage = ask(system, messages, ignore_eos=True)
    assert (reloaded, cached(usage)) == (output, most)
    assert usage["prompt_tokens_details"]["cached_by_source"]["device"] == 0
    assert system.metric("vllm:external_prefix_cache_hits_total") - hits == most

    assert system.reset(external=True)["success"]
    _, cold, usage = ask(system, messages, ignore_eos=True)
    assert (cold, cached(usage)) == (output, 0)


def wait_until_saved(system: System, num_blocks: int) -> None:
    until_blocking(lambda: len(block_keys(system)) >= num_blocks)


@pytest.mark.usefixtures("empty")
def test_blocks_come_back_from_redis_when_the_store_forgot_them(system: System) -> None:
    messages = messages_of({"role": "user", "content": "What is a delta?"})
    prompt, output, _ = ask(system, messages)
    num_blocks = (len(prompt) - 1) // BLOCK_SIZE
    wait_until_saved(system, num_blocks)
    pid = system.child_pids()["store"]
    kill_and_wait(system, "store", pid)
    assert system.reset()["success"]
    until_blocking(lambda: not ask_failed(system))
    _, reloaded, usage = ask(system, messages)
    assert reloaded == output
    assert usage["prompt_tokens_details"]["cached_by_source"]["external"] == num_blocks * BLOCK_SIZE


def ask_failed(system: System) -> bool:
    status, _ = system.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    return status != 200


def kill_and_wait(system: System, name: str, pid: int) -> None:
    import os
    import signal
    import urllib.request

    os.kill(pid, signal.SIGKILL)
    until_blocking(lambda: system.child_pids().get(name, pid) != pid, 20)
    ready = system.endpoints["metrics"][name].replace("/metrics", "/readyz")

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(ready, timeout=2):
                return True
        except OSError:
            return False

    until_blocking(is_ready, 60)


@pytest.mark.usefixtures("empty")
def test_sixteen_at_once_with_shared_prefixes_are_all_right(system: System) -> None:
    questions = [
        f"{verb} {thing}."
        for verb in ("Describe", "Compare", "Explain", "Locate")
        for thing in ("the Nile and the Danube", "a fjord", "the monsoon", "a mesa")
    ]
    with ThreadPoolExecutor(16) as pool:
        turns = [messages_of({"role": "user", "content": text}) for text in questions]
        answers = list(pool.map(lambda messages: ask(system, messages), turns))
    for prompt, output, _ in answers:
        reference().check_greedy(prompt, output)
    assert sum(cached(usage) for _, _, usage in answers) > 0


@pytest.mark.usefixtures("empty")
def test_a_prompt_of_n_tokens_sent_twice_hits_all_full_blocks_before_its_last_token(system: System) -> None:
    for length in (15, 16, 17, 32, 33, 100):
        prompt = [1000 + length * 7 + i * 13 % 4000 for i in range(length)]
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        seen = []
        for _ in range(2):
            status, answer = system.post("/v1/completions", body)
            assert status == 200, answer
            seen.append(cached(answer["usage"]))
        assert seen == [0, (length - 1) // BLOCK_SIZE * BLOCK_SIZE]
        for salt, hit in (("other", 0), ("other", seen[1]), ("another", 0)):
            _, answer = system.post("/v1/completions", {**body, "cache_salt": salt})
            assert cached(answer["usage"]) == hit


@pytest.mark.usefixtures("empty")
def test_salted_prompts_share_no_key_in_redis(system: System) -> None:
    body = {"prompt": list(range(500, 564)), "max_tokens": 1, "temperature": 0}
    for number, salt in enumerate(("t1", "t2"), 1):
        assert system.post("/v1/completions", {**body, "cache_salt": salt})[0] == 200
        wait_until_saved(system, 4 * number)
    assert len(block_keys(system)) == 8


def test_usage_of_a_stream_equals_the_plain_form(system: System, client: OpenAI) -> None:
    arguments = {"model": "", "prompt": "Once upon a time", "max_tokens": 6, "temperature": 0}
    arguments["model"] = client.models.list().data[0].id
    plain = client.completions.create(**arguments)
    chunks = list(client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == plain.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens == 6
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0


def test_a_client_that_goes_away_frees_its_blocks(system: System, client: OpenAI) -> None:
    aborted = system.metric("vllm:request_success_total", finished_reason="abort")
    stream = client.completions.create(
        model=client.models.list().data[0].id, prompt="Count: 1, 2, 3,", max_tokens=1500, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    until_blocking(lambda: system.metric("vllm:num_requests_running") == 0)
    assert system.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
    assert system.metric("vllm:kv_cache_usage_perc") == 0


def test_stop_strings_and_sampling_with_a_seed(system: System) -> None:
    body = {"prompt": "A, B, C, D, E,", "max_tokens": 12, "temperature": 0}
    text = system.post("/v1/completions", body)[1]["choices"][0]["text"]
    stop = text[3:6]
    _, answer = system.post("/v1/completions", {**body, "stop": stop})
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    drawn = {**body, "temperature": 1.0, "top_p": 0.95, "top_k": 40, "seed": 11}
    texts = {system.post("/v1/completions", drawn)[1]["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1
    others = {
        system.post("/v1/completions", {**drawn, "seed": seed})[1]["choices"][0]["text"] for seed in range(4)
    }
    assert len(others) > 1


def test_events_of_a_prompt_reach_a_plain_subscriber(system: System) -> None:
    """Written from the wire description alone: three frames, an array of maps."""
    import msgspec
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
    socket.connect(system.endpoints["engines"][0]["events"])
    time.sleep(0.3)
    prompt = [3000 + i for i in range(40)]
    system.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "cache_salt": "events"})
    stored = []
    deadline_s = time.monotonic() + 10
    while not stored and time.monotonic() < deadline_s:
        if socket.poll(500):
            topic, sequence, payload = socket.recv_multipart()
            assert topic.startswith(b"kv@engine-0@")
            assert len(sequence) == 8
            events = msgspec.msgpack.decode(payload)[1]
            stored += [event for event in events if event["type"] == "BlockStored"]
    assert stored[0]["token_ids"] == prompt[:32]
    assert len(stored[0]["block_hashes"]) == 2
    assert stored[0]["block_size"] == BLOCK_SIZE
    assert stored[0]["parent_block_hash"] is None
    assert stored[0]["medium"] == "GPU"
    assert stored[0]["extra_keys"] == [["events"], None]
    context.destroy(0)


def test_every_service_serves_its_health(system: System) -> None:
    import urllib.request

    assert len(system.endpoints["metrics"]) == 6
    for name, url in system.endpoints["metrics"].items():
        for path in ("/metrics", "/healthz", "/readyz"):
            with urllib.request.urlopen(url.replace("/metrics", path), timeout=5) as answer:
                assert answer.status == 200, (name, path)


@pytest.mark.usefixtures("empty")
def test_log_probabilities_are_the_models_own_and_do_not_come_from_the_cache(
    system: System, client: OpenAI
) -> None:
    model = client.models.list().data[0].id
    messages = messages_of({"role": "user", "content": "What is a delta?"})
    prompt, output, _ = ask(system, messages, max_tokens=4)
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"prompt_logprobs": 1},
    )
    scores = reference().log_probabilities([*prompt, *output])
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    shown = [(entry.logprob, entry.top_logprobs[0].logprob) for entry in content]
    right = [scores[len(prompt) - 1 + i, token].item() for i, token in enumerate(output)]
    assert shown == [pytest.approx((value, value), abs=LOGPROB_TOLERANCE) for value in right]
    # The prompt is cached by now, but its positions were all computed again.
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    values = [
        one[str(token)]["logprob"] for token, one in zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
    ]
    right = [scores[i, token].item() for i, token in enumerate(prompt[1:])]
    assert values == pytest.approx(right, abs=LOGPROB_TOLERANCE)
    assert cached(ask(system, messages)[2]) == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_recorded_answer_with_log_probabilities(system: System) -> None:
    """The reference computed in bfloat16: its values are a tenth of a nat away at most."""
    path = Path(__file__).parents[1] / "conformance" / "vectors" / "http.jsonl"
    recorded = next(
        row for line in path.read_text().splitlines() if (row := json.loads(line))["id"] == "http-038"
    )
    status, answer = system.post(recorded["path"], {**recorded["request"], "model": ""})
    assert status == 200, answer
    (shown,), (right,) = ([one["logprobs"] for one in body["choices"]] for body in (answer, recorded["body"]))
    assert (shown["tokens"], shown["text_offset"]) == (right["tokens"], right["text_offset"])
    assert shown["token_logprobs"] == pytest.approx(right["token_logprobs"], abs=0.1)
    assert shown["top_logprobs"] == [pytest.approx(top, abs=0.1) for top in right["top_logprobs"]]
