"""What is optional in the cache, through the running scheduler: pins, whole hits, shares, miss reasons."""

import grpc
import pytest

from reprise.v1 import engine_pb2 as pb
from reprise_core.errors import InvalidInput
from reprise_scheduler.app import SchedulerApp
from reprise_scheduler.settings import SchedulerSettings
from support.scheduler_harness import GatewaySide, running_scheduler
from support.sim_worker import expected_output
from support.waiting import until
from support.zmq_worker import ZmqWorker

PROMPT = [4 + i * i % 40 for i in range(20)]
MISSES = "reprise_scheduler_lookup_misses_total"


async def test_a_whole_prompt_hit_computes_one_token() -> None:
    async with running_scheduler(full_prompt_hit=True) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        for name in ("first", "second", "third"):
            gateway.submit(name, PROMPT)
            await gateway.ended(name)
            assert gateway.requests[name].token_ids == expected_output(PROMPT, 8)
        cached = [gateway.requests[name].usage.device_tokens for name in ("first", "second", "third")]
        assert cached == [0, 19, 19]
        assert worker.failure is None
        await gateway.cut()
        worker.stop()


async def test_a_pinned_prompt_outlives_others_until_it_is_unpinned() -> None:
    async with running_scheduler(max_pinned_blocks=6, track_misses=True) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, num_blocks=24).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()

        async def cached(name: str, prompt: list[int], **more: object) -> int:
            gateway.submit(name, prompt, **more)
            await gateway.ended(name)
            assert gateway.requests[name].token_ids == expected_output(prompt, 8)
            return gateway.requests[name].usage.device_tokens

        async def churn(label: str) -> None:
            for number in range(6):
                await cached(f"{label}{number}", [10 + number, *range(4, 40)])

        assert await cached("pinned", PROMPT, pin=True, tenant="t") == 0
        (pin,) = (await harness.stub.ListPins(pb.ListPinsRequest())).pins
        assert (pin.tenant, pin.num_tokens, pin.num_blocks) == ("t", 20, 5)
        assert not pin.HasField("expires_in_s")
        assert await harness.metric("reprise_scheduler_pinned_blocks") == 5
        await churn("a")
        assert await cached("again", PROMPT) == 16
        # Another one would pass the limit: it is served all the same.
        assert await cached("refused", [9, *PROMPT], pin=True) == 0
        assert await harness.metric("reprise_scheduler_pins_refused_total") == 1
        await harness.stub.Unpin(pb.UnpinRequest(pin_id=pin.pin_id))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await harness.stub.Unpin(pb.UnpinRequest(pin_id=pin.pin_id))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        await churn("b")
        assert await cached("evicted", PROMPT) == 0
        assert await harness.metric(MISSES, reason="evicted") > 0
        assert await harness.metric(MISSES, reason="never_seen") > 0
        assert await harness.metric(MISSES, reason="hit_cap") == 1
        await gateway.cut()
        worker.stop()


async def test_pins_expire_and_a_reset_drops_them() -> None:
    async with running_scheduler(max_pinned_blocks=10) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        gateway.submit("short", PROMPT, pin=True, pin_ttl_s=0.2)
        gateway.submit("long", [5, *PROMPT], pin=True, pin_ttl_s=100.0)
        await gateway.ended("short", "long")

        async def pins() -> list[pb.Pin]:
            return list((await harness.stub.ListPins(pb.ListPinsRequest())).pins)

        await until(lambda: harness.app.num_running == 0)
        while len(found := await pins()) != 1:
            assert len(found) == 2
        assert 90 < found[0].expires_in_s <= 100
        assert (await harness.stub.ResetPrefixCache(pb.ResetPrefixCacheRequest())).device
        assert await pins() == []
        assert await harness.metric("vllm:kv_cache_usage_perc") == 0
        await gateway.cut()
        worker.stop()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pin": True}, "cache_pin: true, but this engine pins nothing: its max_pinned_blocks is 0"),
        ({"pin_ttl_s": -1.0}, "cache_pin_ttl_s: -1.0"),
        ({"pin_ttl_s": float("inf")}, "cache_pin_ttl_s: inf"),
    ],
)
async def test_pins_that_cannot_be_honoured_are_refused(fields: dict[str, object], words: str) -> None:
    async with running_scheduler() as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        gateway.submit("a", PROMPT, **fields)
        await gateway.ended("a")
        error = gateway.requests["a"].finished.error
        assert error.kind == "invalid"
        assert words in error.message
        await gateway.cut()
        worker.stop()


async def test_all_options_together_change_no_token() -> None:
    options = {
        "full_prompt_hit": True,
        "verify_tokens": True,
        "track_misses": True,
        "max_pinned_blocks": 4,
        "tenant_shares": {"a": 0.2},
    }
    async with running_scheduler(**options) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint, num_blocks=30).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        prompts = {f"r{i}": [5 + i % 4, *PROMPT[: 7 + 4 * (i % 4)]] for i in range(30)}
        for number, (name, prompt) in enumerate(prompts.items()):
            gateway.submit(name, prompt, tenant="ab"[number % 2], pin=number % 5 == 0, pin_ttl_s=0.05)
        await gateway.ended(*prompts, timeout_s=30)
        for name, prompt in prompts.items():
            assert gateway.requests[name].token_ids == expected_output(prompt, 8)
        assert await harness.metric("reprise_scheduler_hash_collisions_total") == 0
        assert worker.failure is None
        await gateway.cut()
        worker.stop()


@pytest.mark.parametrize(
    "settings",
    [
        {"eviction_policy": "no_such_module:Policy"},
        {"eviction_policy": "reprise_scheduler.kv_cache.eviction"},
        {"eviction_policy": "collections:OrderedDict"},
        {
            "eviction_policy": "reprise_scheduler.kv_cache.eviction:LeastRecentlyUsed",
            "tenant_shares": {"a": 1},
        },
    ],
)
def test_a_policy_that_cannot_be_used_stops_the_start(settings: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        SchedulerApp(SchedulerSettings(**settings))


async def test_an_eviction_policy_by_name() -> None:
    name = "reprise_scheduler.kv_cache.eviction:LeastRecentlyUsed"
    async with running_scheduler(eviction_policy=name) as harness:
        worker = ZmqWorker(harness.settings.workers_endpoint).start()
        await harness.wait_for_worker()
        gateway = await GatewaySide(harness).attach()
        gateway.submit("a", PROMPT)
        await gateway.ended("a")
        assert gateway.requests["a"].token_ids == expected_output(PROMPT, 8)
        await gateway.cut()
        worker.stop()
