"""The engine's metrics carry the reference's names, types and labels."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from reprise_core.models import KvGroup, WorkerCapacity
from reprise_scheduler.metrics import EngineMetrics

RECORDED = Path(__file__).parent / "vectors" / "metrics.txt"
NOT_HERE = {
    "vllm:mm_cache_hits_total": "no multi-modal inputs",
    "vllm:mm_cache_queries_total": "no multi-modal inputs",
    "vllm:engine_sleep_state": "an engine of ours does not sleep",
    "vllm:estimated_flops_per_gpu_total": "no estimate is made",
    "vllm:estimated_read_bytes_per_gpu_total": "no estimate is made",
    "vllm:estimated_write_bytes_per_gpu_total": "no estimate is made",
}


def recorded() -> list[tuple[str, str, set[str]]]:
    families = []
    for line in RECORDED.read_text().splitlines():
        if not line.startswith("#"):
            name, kind, labels, _ = line.split("\t")
            families.append((name, kind, {label.split("(")[0].strip() for label in labels.split(", ")}))
    return families


@pytest.fixture(scope="module")
def exposed() -> dict[str, tuple[str, set[str]]]:
    """Name as exposed -> type and label names."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name="m", engine="0")
    group = KvGroup(kind="full_attention", block_size=16, num_layers=1)
    capacity = WorkerCapacity(
        num_blocks=10, block_size=16, block_nbytes=1, groups=(group,), max_num_batched_tokens=1
    )
    metrics.set_cache_config(capacity, {})
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        name = family.name + "_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels}
        found[name] = (family.type, labels - {"le"})
    return found


@pytest.mark.parametrize(("name", "kind", "labels"), recorded(), ids=lambda value: str(value)[:50])
def test_a_recorded_family_is_exposed(
    exposed: dict[str, tuple[str, set[str]]], name: str, kind: str, labels: set[str]
) -> None:
    if name in NOT_HERE:
        assert name not in exposed, f"remove {name} from the list of those left out"
        return
    assert name in exposed
    assert exposed[name] == (kind, labels)
