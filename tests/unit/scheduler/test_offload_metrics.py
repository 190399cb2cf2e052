"""What is exported of loads, stores and look-ups, under the names that the reference's dashboards use."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from reprise_core.steps import TransferMeasure, TransferReport
from reprise_scheduler.metrics import EngineMetrics
from support.sched_driver import Driver

NAMES = {"model_name": "m", "engine": "0"}
BLOCK = 4
PROMPT = [4 + i for i in range(8 * BLOCK + 1)]


class Exported:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics(self.registry, **NAMES)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:{name}", {**NAMES, **labels})


@pytest.fixture
def exported() -> Exported:
    return Exported()


def stored(*, hold_saves: bool = False, **config: Any) -> Driver:
    driver = Driver(connector=True, num_blocks=100, **config)
    driver.worker.hold_saves = hold_saves
    driver.scheduler.connector.set_generation(driver.store.generation)
    driver.add("stored", PROMPT, max_tokens=1)
    driver.run()
    driver.scheduler.reset_prefix_cache(preempt_running=False)
    return driver


def test_transfers_are_summed_by_direction(exported: Exported) -> None:
    loaded = (TransferMeasure(4, 3_000_000, 0.5), TransferMeasure(2, 0, 5.0))
    exported.metrics.offload.observe(TransferReport((), loaded, (TransferMeasure(1, 500, 0.25),)))
    assert exported("kv_offload_load_bytes_total") == 3_000_000
    assert exported("kv_offload_load_time_total") == 5.5
    assert exported("kv_offload_load_size_count") == 1, "a load of which nothing arrived has no size"
    assert exported("kv_offload_load_size_bucket", le="5e+06") == 1
    assert exported("kv_offload_load_size_bucket", le="1e+06") == 0
    assert exported("kv_offload_store_bytes_total") == 500
    assert exported("kv_offload_store_time_total") == 0.25
    assert exported("kv_offload_store_size_count") == 1


def test_look_ups_have_a_delay_for_the_engine_and_one_for_the_request(exported: Exported) -> None:
    exported.metrics.offload.lookup_sync.observe(0.00002)
    exported.metrics.offload.lookup_async.observe(0.03)
    assert exported("kv_offload_lookup_sync_delay_seconds_bucket", le="5e-05") == 1
    assert exported("kv_offload_lookup_async_delay_seconds_bucket", le="0.05") == 1


def test_requests_that_fetch_are_counted_by_stage_and_the_host_tier_by_what_is_in_flight(
    exported: Exported,
) -> None:
    driver = stored()
    exported.metrics.offload.set_sizes(1000, 80_000)
    driver.hold_loads = True
    driver.add("waits", PROMPT)
    driver.plan()
    stages = ("waiting_to_start", "in_progress", "completed_waiting")

    def seen() -> list[float | None]:
        exported.metrics.refresh(driver.scheduler)
        return [exported("num_requests_kv_fetch_by_stage", stage=stage) for stage in stages]

    assert seen() == [1, 0, 0]
    assert exported("num_requests_waiting_by_reason", reason="deferred") == 1
    driver.answer_lookups()
    plan = driver.plan()
    driver.add("shares", PROMPT)
    driver.answer_lookups()
    driver.execute(plan)
    driver.plan()
    assert seen() == [1, 1, 0]
    assert exported("kv_offload_cpu_cache_read_usage_perc") == 0.1
    assert exported("num_requests_waiting_by_reason", reason="deferred") == 2
    assert exported("num_requests_waiting_by_reason", reason="capacity") == 0
    driver.end_loads()
    assert seen() == [0, 0, 1]
    assert exported("num_requests_waiting_by_reason", reason="capacity") == 2
    assert exported("kv_offload_cpu_cache_read_usage_perc") == 0
    driver.run()
    assert seen() == [0, 0, 0]


def test_saves_in_flight_are_those_of_which_nothing_was_heard_yet(exported: Exported) -> None:
    driver = stored(hold_saves=True)
    exported.metrics.offload.set_sizes(1000, 16_000)
    exported.metrics.refresh(driver.scheduler)
    assert exported("kv_offload_cpu_cache_write_usage_perc") == 0.5
    assert exported("kv_offload_cpu_cache_usage_perc") == 0.5
    driver.end_saves()
    exported.metrics.refresh(driver.scheduler)
    assert exported("kv_offload_cpu_cache_usage_perc") == 0


def test_reused_tokens_are_counted_by_tier_and_sum_up(exported: Exported) -> None:
    driver = stored()
    driver.add("half", PROMPT[: 3 * BLOCK + 1], max_tokens=1)
    driver.run()
    request = driver.add("b", PROMPT, max_tokens=1)
    driver.run()
    exported.metrics._observe_prompt(request)
    by_source = {
        source: exported("prompt_tokens_cached_by_source_total", source=source)
        for source in ("device", "host", "disk", "external_unspecified", "p2p")
    }
    assert by_source == {"device": 12, "host": 0, "disk": 0, "external_unspecified": 20, "p2p": 0}
    assert exported("prompt_tokens_cached_total") == 32
    assert exported("prompt_tokens_by_source_total", source="external_kv_transfer") == 20
    assert exported("prompt_tokens_by_source_total", source="local_cache_hit") == 12
    assert exported("prompt_tokens_by_source_total", source="local_compute") == 1
