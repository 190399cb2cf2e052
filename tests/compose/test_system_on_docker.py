"""A user's story on Docker: chats over HTTP, hits from both tiers, events, and what a container may do."""

import json
import time
import uuid
from typing import Any

import httpx
import pytest
import zmq

from compose.deployed_settings import SERVICES
from compose.docker_system import MODEL, ComposeSystem, port
from reprise_core.kv_events import BlockStored, KvEvent
from reprise_wire.event_codec import decode_batch, parse_pub_frames

pytestmark = pytest.mark.compose

BLOCK_SIZE = 16
SYSTEM_PROMPT = (
    "You are a patient librarian. You know every shelf of a very old library by heart, you answer in short"
    " sentences, and you never guess: what you do not know, you look up in the catalogue before you answer."
)


def full_blocks(num_tokens: int) -> int:
    """Tokens that an identical prompt hits: all full blocks before its last token."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_every_service_is_healthy_and_the_model_service_has_ended(system: ComposeSystem) -> None:
    states = {name: item["State"] for name, item in system.containers().items()}
    assert set(states) == {*SERVICES, "redis", "model"}
    model = states.pop("model")
    assert (model["Status"], model["ExitCode"]) == ("exited", 0)
    assert {state["Health"]["Status"] for state in states.values()} == {"healthy"}, states


def test_store_and_worker_share_memory(system: ComposeSystem) -> None:
    assert system.metric("worker", "reprise_worker_store_memory_shared") == 1
    assert system.metric("store", "reprise_store_memory_peers") == 1


def test_containers_run_without_root_or_capabilities_on_a_read_only_image(system: ComposeSystem) -> None:
    for name, item in system.containers().items():
        assert item["Config"]["User"] in ("10001:10001", "redis"), name
        assert item["HostConfig"]["ReadonlyRootfs"], name
        assert item["HostConfig"]["CapDrop"] == ["ALL"], name
        assert item["HostConfig"]["Memory"] > 0, name


def test_ports_are_open_on_loopback_alone(system: ComposeSystem) -> None:
    for name, item in system.containers().items():
        for bindings in (item["HostConfig"]["PortBindings"] or {}).values():
            assert [binding["HostIp"] for binding in bindings] == ["127.0.0.1"], name


@pytest.mark.parametrize("service", SERVICES)
def test_health_and_metrics_are_served(system: ComposeSystem, service: str) -> None:
    assert system.get(service, "/healthz").status_code == 200
    assert system.get(service, "/readyz").json() == {"ready": True, "waiting_for": {}}
    assert "# TYPE " in system.get(service, "/metrics").text


def test_the_same_chat_again_hits_all_full_blocks(system: ComposeSystem) -> None:
    messages = (("system", SYSTEM_PROMPT), ("user", f"Where is book {uuid.uuid4()}?"))
    first = system.chat(*messages)
    second = system.chat(*messages)
    num_tokens = first["usage"]["prompt_tokens"]
    assert num_tokens > 4 * BLOCK_SIZE
    assert cached_tokens(second) == full_blocks(num_tokens)
    assert text(second) == text(first)


def test_the_second_turn_hits_the_first(system: ComposeSystem) -> None:
    opening = (("system", SYSTEM_PROMPT), ("user", f"I am reader {uuid.uuid4()}. What is a folio?"))
    first = system.chat(*opening)
    second = system.chat(*opening, ("assistant", text(first)), ("user", "And a quarto?"))
    hit = cached_tokens(second)
    assert hit % BLOCK_SIZE == 0
    assert full_blocks(first["usage"]["prompt_tokens"]) <= hit < second["usage"]["prompt_tokens"]


def test_after_a_reset_the_blocks_come_back_from_the_store(system: ComposeSystem) -> None:
    messages = (("system", SYSTEM_PROMPT), ("user", f"Who wrote book {uuid.uuid4()}?"))
    first = system.chat(*messages)
    expected = full_blocks(first["usage"]["prompt_tokens"])
    deadline_s = time.monotonic() + 30
    while True:  # blocks are saved in the background
        hits_before = system.metric("scheduler", "vllm:external_prefix_cache_hits_total")
        assert system.http.post("/reset_prefix_cache").status_code == 200
        again = system.chat(*messages)
        hits = system.metric("scheduler", "vllm:external_prefix_cache_hits_total") - hits_before
        assert text(again) == text(first)
        if hits >= expected or time.monotonic() > deadline_s:
            break
    assert hits == expected
    assert cached_tokens(again) == expected


def test_a_stream_ends_with_its_usage(system: ComposeSystem) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to five."}],
        "max_tokens": 12,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with system.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] <= 12
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
    assert streamed == text(system.chat(("user", "Count to five."), max_tokens=12))


def test_block_events_reach_a_subscriber_outside(system: ComposeSystem) -> None:
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVTIMEO, 20_000)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(f"tcp://127.0.0.1:{port('EVENTS_PORT')}")
    try:
        time.sleep(0.5)  # a subscription takes a moment to arrive
        system.chat(("system", SYSTEM_PROMPT), ("user", f"Is book {uuid.uuid4()} lent?"))
        events: list[KvEvent] = []
        deadline_s = time.monotonic() + 20
        while not any(isinstance(event, BlockStored) for event in events):
            assert time.monotonic() < deadline_s, events
            published = parse_pub_frames(subscriber.recv_multipart())
            assert published.topic == f"kv@engine-0@{MODEL}"
            events += decode_batch(published.payload).events
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("service", SERVICES)
def test_a_killed_service_comes_back_and_serves(system: ComposeSystem, service: str) -> None:
    system.kill(service)
    if service == "gateway":
        wait_for_gateway(system)
    answer = system.chat(("user", "Are you there?"), max_tokens=4)
    assert answer["usage"]["completion_tokens"] >= 1


def wait_for_gateway(system: ComposeSystem) -> None:
    """Its clients cannot be served while it is away; all others may be."""
    deadline_s = time.monotonic() + 60
    while not is_up(system):
        assert time.monotonic() < deadline_s, "the gateway did not come back"
        time.sleep(0.2)


def is_up(system: ComposeSystem) -> bool:
    try:
        return system.http.get("/health").status_code == 200
    except httpx.HTTPError:
        return False
