"""The tokenizer service over gRPC, through the typed client."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from reprise_core.errors import ErrorKind
from reprise_core.extra_keys import HashInputs, LoraAdapter
from reprise_core.hash_algorithms import HashAlgorithm
from reprise_core.hash_chain import BlockHasher
from reprise_core.none_hash import none_hash
from reprise_runtime.grpc_server import channel
from reprise_tokenizer.app import TokenizerApp
from reprise_wire.clients.tokenizer import ChatPrompt, DetokenizeOpen, DetokenizeUpdate, TokenizerClient
from reprise_wire.error_codec import PeerError
from reprise_wire.hash_profiles import HashProfile, HashRequest
from support.gateway_system import free_address, make_tokenizer
from support.models import write_byte_level_model

PROFILE = HashProfile("p", HashAlgorithm.SHA256, 2, none_hash(HashAlgorithm.SHA256, "s"))


class Service:
    def __init__(self, app: TokenizerApp, to: grpc.aio.Channel) -> None:
        self.app = app
        self.channel = to
        self.client = TokenizerClient(to)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.app.registry.get_sample_value(f"reprise_tokenizer_{name}", labels)


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    address = free_address()
    app = make_tokenizer(write_byte_level_model(tmp_path), address, max_stream_requests=3, work_queue_calls=1)
    await app.start()
    to = channel(address)
    yield Service(app, to)
    await to.close()
    await app.stop()


async def test_info_and_health(service: Service) -> None:
    info = await service.client.info()
    assert (info.model_name, info.has_chat_template, info.eos_token_ids) == ("smollm2", True, (2,))
    health = health_pb2_grpc.HealthStub(service.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="reprise.v1.TokenizerService"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert service.app.readiness.ready


async def test_tokens_and_hashes_in_one_call(service: Service) -> None:
    lora = LoraAdapter(name="a", int_id=1, path="/a")
    request = HashRequest((PROFILE,), cache_salt="salt", lora=lora)
    prompt = await service.client.tokenize_text("The capital of France is Paris", hashing=request)
    hasher = BlockHasher(algorithm=PROFILE.algorithm, block_size=2, none_hash=PROFILE.none_hash)
    expected = hasher.chain(HashInputs(cache_salt="salt", lora=lora)).append(prompt.token_ids)
    assert len(expected) > 1
    assert [(one.profile_id, one.digests) for one in prompt.hashes] == [("p", b"".join(expected))]
    assert await service.client.hash_tokens(prompt.token_ids, request) == prompt.hashes
    assert (await service.client.detokenize(prompt.token_ids)) == "The capital of France is Paris"


async def test_a_chat(service: Service) -> None:
    chat = ChatPrompt('[{"role": "user", "content": "hé"}]')
    ids = (await service.client.tokenize_chat(chat)).token_ids
    text = await service.client.detokenize(ids)
    assert text == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert await service.client.detokenize(ids, skip_special_tokens=True) == "user\nhé\nassistant\n"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (ChatPrompt('[{"role": "robot", "content": "hi"}]'), "messages: .*unknown role robot"),
        (ChatPrompt("[]"), "messages: is empty"),
        (ChatPrompt('[{"content": "hi"}]'), r"messages\[0\].role"),
        (ChatPrompt('[{"role": "user"}]', tools_json="{}"), "tools: must be a list"),
        (
            ChatPrompt('[{"role": "user"}]', template_kwargs_json="[]"),
            "chat_template_kwargs: must be an object",
        ),
        (ChatPrompt('[{"role": "user"}]', chat_template="{% if %}"), "chat_template: does not compile"),
    ],
)
async def test_refusals_are_named_and_counted(service: Service, chat: ChatPrompt, message: str) -> None:
    with pytest.raises(PeerError, match=message) as caught:
        await service.client.tokenize_chat(chat)
    assert caught.value.kind is ErrorKind.INVALID
    assert service.metric("refused_calls_total", reason="invalid") == 1


async def test_one_stream_for_many_requests(service: Service) -> None:
    words = (await service.client.tokenize_text("One two three four")).token_ids
    stream = await service.client.text_stream(timeout_s=5)
    opening = DetokenizeOpen(stop=("three",))
    await stream.write(
        [DetokenizeUpdate("a", words, opening), DetokenizeUpdate("b", words[:2], DetokenizeOpen())]
    )
    deltas = await stream.read()
    assert deltas is not None
    assert [(delta.request_id, delta.matched_stop) for delta in deltas] == [("a", "three"), ("b", None)]
    assert deltas[0].text == "One two "
    assert deltas[0].finished
    await stream.write([DetokenizeUpdate("a", words), DetokenizeUpdate("b", words[2:], finish=True)])
    rest = await stream.read()
    assert rest is not None
    assert [delta.request_id for delta in rest] == ["b"]
    assert deltas[1].text + rest[0].text == "One two three four"
    assert rest[0].finished
    stream.cancel()


async def test_a_stream_with_too_many_requests_ends_and_its_state_is_dropped(service: Service) -> None:
    stream = await service.client.text_stream(timeout_s=5)
    await stream.write([DetokenizeUpdate(str(i), [5], DetokenizeOpen()) for i in range(4)])
    with pytest.raises(PeerError, match="more than 3 requests") as caught:
        await stream.read()
    assert caught.value.kind is ErrorKind.EXHAUSTED
    assert service.metric("stream_requests") == 0
    assert service.metric("refused_streams_total") == 1
    assert await service.client.detokenize([5])


async def test_a_service_that_is_away_is_unavailable() -> None:
    to = channel(free_address())
    with pytest.raises(PeerError) as caught:
        await TokenizerClient(to).info()
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    await to.close()


async def test_bytes_of_single_tokens(service: Service) -> None:
    prompt = await service.client.tokenize_text("été 日本")
    tokens = await service.client.token_bytes([*prompt.token_ids, 100_000])
    assert b"".join(tokens).decode() == "été 日本"
    assert tokens[-1] == b""
    assert len(tokens) == len(prompt.token_ids) + 1
    assert await service.client.token_bytes([]) == []
