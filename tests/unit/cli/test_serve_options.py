"""Options of `reprise serve` under the reference's names, as settings of the services."""

import json
from pathlib import Path
from typing import Any

import pytest

from reprise_cli.serve.engine_options import EngineOptions, Transfer, read_events_config, read_transfer_config
from reprise_cli.serve.layout import Layout, ServeOptions, make_layout
from reprise_core.errors import InvalidInput
from reprise_publisher.settings import PublisherSettings
from reprise_scheduler.settings import SchedulerSettings

DEFAULTS: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 0,
    "max_model_len": 0,
    "dtype": "auto",
    "lora_modules": "",
    "max_lora_rank": 16,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "long_prefill_token_threshold": 0,
    "enable_chunked_prefill": True,
    "scheduling_policy": "fcfs",
    "watermark": 0.0,
    "must_fit": True,
    "max_num_waiting": 1024,
    "max_num_waiting_tokens": 0,
    "async_scheduling": True,
    "enable_prefix_caching": True,
    "prefix_caching_hash_algo": "sha256",
}


def layout(*, engines: int = 1, kv_events: str = "", **options: Any) -> Layout:
    return make_layout(
        ServeOptions(
            model_path=Path("/model"),
            model_name="m",
            state_dir=Path("/state"),
            engines=engines,
            kv_events=read_events_config(kv_events),
            overrides=EngineOptions(**{**DEFAULTS, **options}).overrides(),
        )
    )


def environment(made: Layout, process: str) -> dict[str, str]:
    return dict(next(spec.environment for spec in made.processes if spec.name == process))


def scheduler_settings(made: Layout, monkeypatch: pytest.MonkeyPatch) -> SchedulerSettings:
    for name, value in environment(made, "scheduler").items():
        monkeypatch.setenv(name, value)
    return SchedulerSettings()


def test_each_option_reaches_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {
        "long_prefill_token_threshold": 64,
        "enable_chunked_prefill": False,
        "scheduling_policy": "priority",
        "watermark": 0.1,
        "must_fit": False,
        "max_num_waiting": 7,
        "max_num_waiting_tokens": 900,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 256,
        "async_scheduling": False,
        "enable_prefix_caching": False,
        "prefix_caching_hash_algo": "xxhash",
    }
    settings = scheduler_settings(layout(**asked), monkeypatch)
    assert {name: getattr(settings, name) for name in asked} == asked
    assert settings.store_address
    assert settings.publisher_endpoint


def test_what_was_not_asked_for_is_the_services_own_default(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = scheduler_settings(layout(), monkeypatch)
    monkeypatch.undo()
    own = SchedulerSettings()
    of_the_worker = {"block_size", "num_blocks", "max_model_len", "dtype", "lora_modules", "max_lora_rank"}
    names = set(DEFAULTS) - of_the_worker
    for name in (*names, "kv_role", "kv_load_failure_policy"):
        assert getattr(settings, name) == getattr(own, name), name


def test_the_worker_has_its_share() -> None:
    worker = environment(layout(block_size=7, num_blocks=99, lora_modules="a=/a"), "worker")
    assert worker["REPRISE_WORKER_LORA_MODULES"] == "a=/a"
    assert worker["REPRISE_WORKER_MAX_LORA_RANK"] == "16"
    assert worker["REPRISE_WORKER_BLOCK_SIZE"] == "7"
    assert worker["REPRISE_WORKER_NUM_BLOCKS"] == "99"


@pytest.mark.parametrize("text", ["{}", "null", '{"enable_kv_cache_events": false, "topic": "t"}'])
def test_events_can_be_switched_off(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layout(kv_events=text)
    assert scheduler_settings(made, monkeypatch).publisher_endpoint == ""
    assert environment(made, "publisher")["REPRISE_PUBLISHER_EVENTS_CONFIG"] == "{}"
    assert made.endpoints["engines"][0]["events"] == ""


def test_an_events_config_goes_over_our_endpoints_and_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"enable_kv_cache_events": True, "endpoint": "tcp://*:7000", "buffer_steps": 9})
    made = layout(engines=2, kv_events=text)
    for name, value in environment(made, "publisher-1").items():
        monkeypatch.setenv(name, value)
    events = PublisherSettings().events
    assert (events.endpoint, events.buffer_steps, events.topic) == ("tcp://*:7001", 9, "kv@engine-1@m")
    assert events.replay_endpoint
    assert [engine["events"] for engine in made.endpoints["engines"]] == [
        "tcp://127.0.0.1:7000",
        "tcp://127.0.0.1:7001",
    ]


def test_a_transfer_config_says_what_is_done_with_external_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"kv_connector": "RepriseConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "fail"}'
    settings = scheduler_settings(layout(transfer=read_transfer_config(text)), monkeypatch)
    assert (settings.kv_role.value, settings.kv_load_failure_policy.value) == ("kv_consumer", "fail")
    assert read_transfer_config("") == Transfer()


@pytest.mark.parametrize("text", ["{}", "null"])
def test_without_a_connector_neither_side_knows_a_store(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layout(transfer=read_transfer_config(text))
    assert scheduler_settings(made, monkeypatch).store_address == ""
    assert environment(made, "worker")["REPRISE_WORKER_STORE_ENDPOINT"] == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object or null"),
        ('{"kv_connector": "Other", "kv_role": "kv_both"}', "kv_connector: 'Other', must be one of Reprise"),
        ('{"kv_connector": "RepriseConnector"}', "kv_role: missing, must be one of kv_both"),
        ('{"kv_connector": "RepriseConnector", "kv_role": "both"}', "kv_role: 'both'"),
        ('{"kv_conector": "RepriseConnector"}', "kv_conector: not known"),
        (
            '{"kv_connector": "RepriseConnector", "kv_role": "kv_both", "kv_load_failure_policy": "x"}',
            "kv_load_failure_policy: 'x', must be one of recompute, fail",
        ),
    ],
)
def test_a_bad_transfer_config_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match="kv_transfer_config") as refused:
        read_transfer_config(text)
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["{", "7", '{"enable": true}', '{"publisher": "kafka"}'])
def test_a_bad_events_config_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidInput, match="kv_events_config"):
        read_events_config(text)
