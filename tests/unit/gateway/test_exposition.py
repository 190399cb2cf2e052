"""Several expositions as one."""

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from reprise_gateway.exposition import merge_expositions


def _text(engine: str, amount: float) -> str:
    registry = CollectorRegistry()
    counter = Counter("vllm:prompt_tokens", "Prompt tokens", ["engine", "text"], registry=registry)
    counter.labels(engine, 'a "}" b').inc(amount)
    Histogram("vllm:e2e", "Time", ["engine"], buckets=(1, 2), registry=registry).labels(engine).observe(1.5)
    return generate_latest(registry).decode()


def test_families_are_merged_and_labels_kept() -> None:
    text = merge_expositions([_text("0", 3), "", _text("1", 4)])
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    tokens = next(family for family in families if family.name == "vllm:prompt_tokens")
    totals = {one.labels["engine"]: one.value for one in tokens.samples if one.name.endswith("_total")}
    assert totals == {"0": 3.0, "1": 4.0}
    assert text.count("# TYPE vllm:e2e histogram") == 1
    assert text.count('vllm:e2e_bucket{engine="1"') == 3


def test_a_series_that_comes_twice_is_kept_once() -> None:
    text = merge_expositions([_text("0", 3), _text("0", 4)])
    assert text.count("vllm:prompt_tokens_total{") == 1
    assert merge_expositions(["x 1\n", "x 2\n"]) == "x 1\n"
