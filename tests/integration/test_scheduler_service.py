"""The scheduler service over real gRPC and ZMQ, with a simulated worker that checks every slot."""

import asyncio
from pathlib import Path

import grpc
import pytest
import zmq

from reprise.v1 import common_pb2
from reprise.v1 import engine_pb2 as pb
from reprise_wire import step_codec
from support.gateway_system import free_address, make_tokenizer
from support.models import write_byte_level_model
from support.scheduler_harness import GatewaySide, running_scheduler
from support.sim_worker import expected_output
from support.waiting import until
from support.zmq_worker import ZmqWorker


def prompt_of(number: int, length: int = 21) -> list[int]:
    return [4 + (number * 7 + i * i) % 40 for i in range(length)]


async def test_an_identical_prompt_hits_all_full_blocks_but_the_last_token() -> None:
    async with running_scheduler() as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        prompt = prompt_of(1, 20)
        gateway.submit("a", prompt)
        await gateway.ended("a")
        gateway.submit("b", prompt)
        gateway.submit("salted", prompt, salt="other")
        await gateway.ended("b", "salted")
        assert gateway.requests["a"].token_ids == expected_output(prompt, 8)
        assert gateway.requests["b"].token_ids == expected_output(prompt, 8)
        assert gateway.requests["a"].usage.device_tokens == 0
        assert gateway.requests["b"].usage.device_tokens == (20 - 1) // 4 * 4
        assert gateway.requests["salted"].usage.device_tokens == 0
        assert await harness.metric("vllm:prefix_cache_queries_total") == 60
        assert await harness.metric("vllm:prefix_cache_hits_total") == 16
        assert await harness.metric("vllm:prompt_tokens_total") == 60
        assert await harness.metric("vllm:generation_tokens_total") == 24
        await gateway.cut()
        worker.stop()


async def test_many_requests_on_a_short_pool_are_preempted_and_right() -> None:
    async with running_scheduler(max_num_batched_tokens=32) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, num_blocks=24).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        prompts = {f"r{i}": [*prompt_of(i % 3)[: 8 + i % 9], 5 + i] for i in range(24)}
        for name, prompt in prompts.items():
            gateway.submit(name, prompt, max_tokens=20)
        await gateway.ended(*prompts, timeout_s=30)
        for name, prompt in prompts.items():
            assert gateway.requests[name].token_ids == expected_output(prompt, 20)
        assert await harness.metric("vllm:num_preemptions_total") > 0
        assert await harness.metric("vllm:kv_cache_usage_perc") == 0
        assert worker.failure is None
        await gateway.cut()
        worker.stop()


@pytest.mark.parametrize("blocks_after", [64, 40])
async def test_a_killed_worker_changes_no_token(blocks_after: int) -> None:
    async with running_scheduler() as harness:
        endpoint = harness.settings.workers_endpoint
        worker = ZmqWorker(endpoint, step_delay_s=0.01).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        prompts = {f"r{i}": prompt_of(i) for i in range(5)}
        for name, prompt in prompts.items():
            gateway.submit(name, prompt, max_tokens=60)
        await until(lambda: all(len(r.token_ids) > 5 for r in gateway.requests.values()))
        worker.stop()
        await until(lambda: not harness.app.readiness.ready)
        second = ZmqWorker(endpoint, num_blocks=blocks_after).start()
        await gateway.ended(*prompts, timeout_s=20)
        for name, prompt in prompts.items():
            assert gateway.requests[name].token_ids == expected_output(prompt, 60)
        assert await harness.metric("vllm:generation_tokens_total") == 5 * 60
        await gateway.cut()
        second.stop()


async def test_a_stopped_worker_that_wakes_up_is_told_that_it_is_stale() -> None:
    async with running_scheduler() as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, step_delay_s=0.01).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        gateway.submit("a", prompt_of(1), max_tokens=60)
        await until(lambda: len(gateway.requests["a"].token_ids) > 5)
        worker.pause()
        await until(lambda: not harness.app.readiness.ready)
        worker.resume()
        await gateway.ended("a", timeout_s=20)
        assert gateway.requests["a"].token_ids == expected_output(prompt_of(1), 60)
        assert worker.sessions_opened == 2
        assert await harness.metric("reprise_scheduler_worker_stale_messages_total") > 0
        await gateway.cut()
        worker.stop()


async def test_a_stream_that_is_cut_and_attached_again_loses_and_repeats_nothing() -> None:
    async with running_scheduler(stream_grace_s=5.0) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, step_delay_s=0.005).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        gateway.submit("a", prompt_of(1), max_tokens=80)
        gateway.submit("short", prompt_of(2), max_tokens=12)
        await until(lambda: len(gateway.requests["a"].token_ids) > 5)
        await gateway.cut()
        await asyncio.sleep(0.2)  # "short" ends while nobody listens
        await gateway.attach({name: len(r.token_ids) for name, r in gateway.requests.items()})
        await gateway.ended("a", "short")
        assert gateway.requests["a"].token_ids == expected_output(prompt_of(1), 80)
        assert gateway.requests["short"].token_ids == expected_output(prompt_of(2), 12)
        await gateway.cut()
        worker.stop()


async def test_requests_of_a_gateway_that_does_not_come_back_are_aborted() -> None:
    async with running_scheduler(stream_grace_s=0.3) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, step_delay_s=0.02).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        gateway.submit("a", prompt_of(1), max_tokens=100)
        await until(lambda: len(gateway.requests["a"].token_ids) > 1)
        await gateway.cut()
        scheduler = harness.app._loop.scheduler
        await until(lambda: not scheduler.unfinished(), 3)
        assert scheduler.manager.usage == 0
        await gateway.attach({"a": 0})
        await gateway.ended("a")
        assert gateway.requests["a"].finished.error.kind == "not_found"
        await gateway.cut()
        worker.stop()


async def test_an_abort_frees_the_blocks_within_a_step_and_disturbs_nobody() -> None:
    async with running_scheduler() as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, step_delay_s=0.01).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        gateway.submit("gone", prompt_of(1), max_tokens=100)
        gateway.submit("stays", prompt_of(2), max_tokens=40)
        await until(lambda: len(gateway.requests["gone"].token_ids) > 3)
        gateway.send(abort=pb.Abort(request_id="gone"))
        await gateway.ended("stays")
        assert len(gateway.requests["gone"].token_ids) < 40
        assert gateway.requests["stays"].token_ids == expected_output(prompt_of(2), 40)
        assert await harness.metric("vllm:request_success_total", finished_reason="abort") == 1
        await gateway.cut()
        worker.stop()


BAD = {
    "empty": ({"prompt": []}, "token_ids"),
    "long": ({"prompt": [5] * 128}, "128 tokens"),
    "vocabulary": ({"prompt": [5, 999]}, "999"),
    "max_tokens": ({"prompt": [5], "sampling": pb.SamplingParams(top_p=1.0)}, "max_tokens"),
    "top_p": ({"prompt": [5], "sampling": pb.SamplingParams(temperature=1, top_p=2, max_tokens=1)}, "top_p"),
    "hashes": ({"prompt": [5] * 9, "block_hashes": "odd"}, "hashes"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_refused_by_name(name: str) -> None:
    async with running_scheduler() as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        arguments, words = BAD[name]
        if arguments.get("block_hashes") == "odd":
            profile_id = harness.info.hash_profile.id
            odd = common_pb2.ProfileHashes(profile_id=profile_id, digests=b"x" * 33)
            arguments = {**arguments, "block_hashes": odd}
        gateway.submit("bad", **arguments)
        gateway.submit("good", prompt_of(3))
        await gateway.ended("bad", "good")
        assert words in gateway.requests["bad"].finished.error.message
        assert gateway.requests["good"].token_ids == expected_output(prompt_of(3), 8)
        await gateway.cut()
        worker.stop()


async def test_a_full_waiting_queue_refuses_and_counts() -> None:
    async with running_scheduler(max_num_waiting=3, max_num_seqs=1) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, step_delay_s=0.02).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        names = [f"r{i}" for i in range(8)]
        for name in names:
            gateway.submit(name, prompt_of(1), max_tokens=10)
        await gateway.ended(*names)
        refused = [n for n in names if gateway.requests[n].finished.error.kind == "exhausted"]
        assert len(refused) >= 4
        assert await harness.metric("vllm:admission_rejections_total") == len(refused)
        await gateway.cut()
        worker.stop()


async def test_garbage_and_foreign_versions_are_refused_and_the_process_lives() -> None:
    async with running_scheduler() as harness:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(harness.settings.workers_endpoint)
        for frames in ([b""], [b"\xff", b"\xff"], [b"x"] * 5, [b"\x93\x01", b"{}"]):
            dealer.send_multipart(frames)
        _, body = step_codec.encode(step_codec.Kind.STALE, step_codec.Stale(), session=b"")
        future = step_codec.Header(99, "hello", b"", 0)
        dealer.send_multipart([step_codec._encoder.encode(future), body])
        await until(lambda: dealer.poll(0) != 0)
        answer = dealer.recv_multipart()
        refused = step_codec.decode_body(step_codec.decode_header(answer), answer, step_codec.Refused)
        assert refused.worker_version == 99
        assert refused.scheduler_version == step_codec.PROTOCOL_VERSION
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        assert await harness.metric("reprise_scheduler_worker_malformed_messages_total") == 4
        dealer.close(0)
        worker.stop()


async def test_before_a_worker_registers_calls_say_so() -> None:
    async with running_scheduler() as harness:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await harness.stub.GetInfo(pb.GetInfoRequest())
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no worker" in error.value.details()
        assert "waiting for a worker" in harness.app.readiness.waiting_for()["worker"]


async def test_reset_needs_free_blocks_or_leave_to_preempt() -> None:
    async with running_scheduler() as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, step_delay_s=0.01).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        gateway.submit("a", prompt_of(1), max_tokens=60)
        await until(lambda: len(gateway.requests["a"].token_ids) > 3)
        answer = await harness.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        assert not answer.device
        assert not answer.HasField("external")
        request = pb.ResetPrefixCacheRequest(reset_running_requests=True, reset_external=True)
        answer = await harness.stub.ResetPrefixCache(request)
        assert answer.device
        assert answer.external
        await gateway.ended("a")
        assert gateway.requests["a"].token_ids == expected_output(prompt_of(1), 60)
        await gateway.cut()
        worker.stop()


async def test_a_prompt_without_hashes_of_this_profile_is_hashed_by_the_tokenizer(tmp_path: Path) -> None:
    address = free_address()
    tokenizer = make_tokenizer(write_byte_level_model(tmp_path), address)
    await tokenizer.start()
    async with running_scheduler(tokenizer_address=address) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        prompt = prompt_of(5, 20)
        gateway.submit("hashed", prompt)
        await gateway.ended("hashed")
        foreign = common_pb2.ProfileHashes(profile_id="foreign", digests=b"x" * 32 * 5)
        gateway.submit("foreign", prompt, block_hashes=foreign)
        await gateway.ended("foreign")
        assert gateway.requests["foreign"].usage.device_tokens == 16
        assert await harness.metric("reprise_scheduler_rehashed_prompts_total") == 1
        await tokenizer.stop()
        gateway.submit("alone", prompt, block_hashes=foreign)
        await gateway.ended("alone")
        assert gateway.requests["alone"].finished.error.kind == "unavailable"
        await gateway.cut()
        worker.stop()
