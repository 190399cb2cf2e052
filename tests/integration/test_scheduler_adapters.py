"""Adapters at the scheduler's doors: who may leave the hashes to it, and which workers it takes."""

from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from reprise.v1 import common_pb2
from reprise_core.extra_keys import LoraAdapter
from reprise_wire.step_codec import Kind, Refused, decode_body, decode_header, encode
from support.gateway_system import free_address, make_tokenizer
from support.models import write_byte_level_model
from support.scheduler_harness import GatewaySide, running_scheduler
from support.sim_worker import expected_output
from support.waiting import until
from support.zmq_worker import ZmqWorker

PROMPT = [4 + i * i % 40 for i in range(21)]
SQL = LoraAdapter("sql", 1, "/adapters/sql", "ab" * 16)
CHAT = LoraAdapter("chat", 2, "/adapters/chat", "cd" * 16)


async def test_a_request_that_names_an_adapter_alone_is_hashed_with_its_path(tmp_path: Path) -> None:
    """Whatever hashes it brings: they cannot be of the path."""
    address = free_address()
    tokenizer = make_tokenizer(write_byte_level_model(tmp_path), address)
    await tokenizer.start()
    async with running_scheduler(tokenizer_address=address) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, adapters=(SQL, CHAT)).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        by_path = common_pb2.LoraAdapter(name="sql", path="/adapters/sql")
        by_name = common_pb2.LoraAdapter(name="sql")
        for name, lora in (("full", by_path), ("short", by_name), ("other", None)):
            gateway.submit(name, PROMPT, **({"lora": lora} if lora is not None else {}))
            await gateway.ended(name)
            assert gateway.requests[name].token_ids == expected_output(PROMPT, 8)
        hits = [gateway.requests[name].usage.device_tokens for name in ("full", "short", "other")]
        assert hits == [0, 20, 0]
        assert await harness.metric("reprise_scheduler_rehashed_prompts_total") == 1
        assert worker.failure is None
        await gateway.cut()
        worker.stop()
    await tokenizer.stop()


@pytest.mark.parametrize(
    ("adapters", "problem"),
    [
        ((SQL, replace(SQL, int_id=2)), "have no names of their own"),
        ((replace(SQL, name=""),), "have no names of their own"),
        ((CHAT, SQL), "adapter 'chat' has the id 2, must be 1"),
        ((replace(SQL, digest=""),), "adapter 'sql': its content has no digest"),
        ((replace(SQL, digest="ab:cd" * 4),), "adapter 'sql': its content has no digest"),
    ],
)
async def test_a_worker_whose_adapters_cannot_be_told_apart_is_refused(
    adapters: tuple[LoraAdapter, ...], problem: str
) -> None:
    async with running_scheduler() as harness:
        hello = ZmqWorker(harness.settings.workers_endpoint, adapters=adapters)._hello()
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(harness.settings.workers_endpoint)
        dealer.send_multipart(encode(Kind.HELLO, hello, session=b""))
        await until(lambda: dealer.poll(0) != 0)
        frames = dealer.recv_multipart()
        assert problem in decode_body(decode_header(frames), frames, Refused).reason
        assert not harness.app.readiness.ready
        dealer.close(0)
