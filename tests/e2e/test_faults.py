"""Processes die, pools are short, input is bad: answers stay right and the next request succeeds."""

import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.reference import reference
from support.system import System, start_system
from support.waiting import until_blocking

PROMPT = "The lighthouse keeper wrote in his diary every evening. Today he wrote:"
SERVICES = ("redis", "store", "publisher", "worker", "scheduler", "tokenizer", "gateway")


@pytest.fixture(scope="module")
def right() -> list[int]:
    return []


def complete(system: System, prompt: object = PROMPT, **more: object) -> tuple[int, dict]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True, **more}
    return system.post("/v1/completions", body)


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_service_comes_back_and_the_next_request_succeeds(system: System, service: str) -> None:
    status, before = complete(system)
    assert status == 200
    pid = system.child_pids()[service]
    os.kill(pid, signal.SIGKILL)
    answers = []

    def answered() -> bool:
        try:
            answers.append(complete(system))
        except OSError:  # the gateway itself is away
            return False
        return answers[-1][0] == 200

    until_blocking(answered, 60)
    assert answers[-1][1]["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    until_blocking(lambda: system.child_pids().get(service, pid) != pid, 20)
    until_blocking(lambda: all(is_ready(url) for url in system.endpoints["metrics"].values()), 60)
    assert complete(system)[0] == 200


def is_ready(metrics_url: str) -> bool:
    try:
        with urllib.request.urlopen(metrics_url.replace("/metrics", "/readyz"), timeout=2):
            return True
    except OSError:
        return False


def test_a_worker_killed_in_the_middle_of_a_stream_changes_no_token(system: System) -> None:
    _, calm = complete(system, max_tokens=60, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, system, max_tokens=60, ignore_eos=True)
        generated = system.metric("vllm:generation_tokens_total")
        until_blocking(lambda: system.metric("vllm:generation_tokens_total") > generated + 5)
        os.kill(system.child_pids()["worker"], signal.SIGKILL)
        status, answer = running.result(120)
    assert status == 200
    assert answer["choices"][0]["token_ids"] == calm["choices"][0]["token_ids"]
    assert answer["usage"]["completion_tokens"] == 60


BAD = {
    "unknown model": ("/v1/completions", {"model": "nope", "prompt": "x"}, 404, "nope"),
    "empty prompt": ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    "no tokens": ("/v1/completions", {"prompt": []}, 400, "prompt"),
    "prompt beyond the context": ("/v1/completions", {"prompt": [5] * 9000}, 400, "9000"),
    "negative max_tokens": ("/v1/completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    "huge max_tokens": ("/v1/completions", {"prompt": "x", "max_tokens": 10**9}, 400, "max_tokens"),
    "wrong type": ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    "no messages": ("/v1/chat/completions", {}, 400, "messages"),
    "unknown role": (
        "/v1/chat/completions",
        {"messages": [{"role": "wizard", "content": "hi"}]},
        400,
        "role",
    ),
    "token outside the vocabulary": ("/v1/completions", {"prompt": [10**7]}, 400, "10000000"),
    "not honoured": ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
}


def test_bad_input_is_refused_by_name_and_disturbs_nobody(system: System) -> None:
    _, calm = complete(system, max_tokens=40, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(complete, system, max_tokens=40, ignore_eos=True)
        for name, (path, body, status, words) in BAD.items():
            got, answer = system.post(path, body)
            assert got == status, (name, answer)
            assert words in str(answer["error"]), (name, answer)
        for raw in (b'{"prompt": "x"', b"[]", b'"text"', b'{"prompt": "\xff\xfe"}', b""):
            got, answer = system.post("/v1/completions", None, raw=raw)
            assert got == 400, (raw, answer)
            assert answer["error"]["message"]
        status, answer = running.result(120)
    assert status == 200
    assert answer["choices"][0]["token_ids"] == calm["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A pool of 20 blocks and two engines' worth of trouble: no Redis, one step at a time."""
    running = start_system(
        tmp_path_factory.mktemp("small"), "--num-gpu-blocks-override", "21", "--no-redis", "--block-size", "8"
    )
    try:
        yield running
    finally:
        running.stop()


def test_preempted_requests_give_the_same_text(small: System) -> None:
    prompts = [f"Item {number}: a short list of fruits. First," for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda text: complete(small, text, max_tokens=40, ignore_eos=True), prompts))
    assert small.metric("vllm:num_preemptions_total") > 0
    for text, (status, answer) in zip(prompts, answers, strict=True):
        assert status == 200
        choice = answer["choices"][0]
        assert len(choice["token_ids"]) == 40
        reference().check_greedy(small.token_ids({"prompt": text}), choice["token_ids"])
    assert small.metric("vllm:kv_cache_usage_perc") == 0


def test_a_prompt_longer_than_the_pool_is_refused_with_the_numbers(small: System) -> None:
    status, answer = complete(small, [7] * 200)
    assert status == 400
    assert "160" in answer["error"]["message"]  # 20 blocks of 8 tokens
    assert "200" in answer["error"]["message"]


def test_two_installations_run_side_by_side_and_ctrl_c_leaves_nothing(system: System, tmp_path: Path) -> None:
    other = start_system(tmp_path, "--engines", "2")
    assert [engine["id"] for engine in other.endpoints["engines"]] == ["engine-0", "engine-1"]
    first = complete(system)[1]["choices"][0]["token_ids"]
    for _ in range(2):
        assert complete(other)[1]["choices"][0]["token_ids"] == first
    took_s = other.stop()
    assert took_s < 5.0
    assert not (tmp_path / "ready.json").exists()
    ports = [other.endpoints["gateway"].rsplit(":", 1)[1]]
    for port in ports:
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)


def test_a_model_that_is_not_there_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(AssertionError, match="serve ended with 1") as failure:
        start_system(tmp_path, "--model", str(tmp_path / "nowhere"))
    log = (tmp_path / "serve.log").read_text().strip()
    assert "nowhere" in log, failure.value
    assert "Traceback" not in log
    assert len(log.splitlines()) <= 2
    assert time.monotonic() - started_s < 60


def test_an_unsupported_model_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path / "bloom")
    with pytest.raises(AssertionError, match="serve ended with 1"):
        start_system(tmp_path / "run", "--model", str(tmp_path / "bloom"))
    log = (tmp_path / "run" / "serve.log").read_text()
    assert "bloom" in log.lower()
    assert "Traceback" not in log
