"""The events config comes as JSON; what is wrong in it is named."""

import pytest
from pydantic import ValidationError

from reprise_publisher.settings import PublisherSettings
from reprise_wire.events_config import BindMode


def test_the_defaults_are_the_references() -> None:
    settings = PublisherSettings()
    assert not settings.events.publishes
    assert settings.events_endpoint == "tcp://*:5557"
    assert settings.replay_endpoint == ""
    assert settings.bind_mode is BindMode.AUTO


def test_ranks_move_both_ports() -> None:
    config = '{"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "bind": "connect"}'
    settings = PublisherSettings(events_config=config, data_parallel_rank=3, data_parallel_size=4)
    assert (settings.events_endpoint, settings.replay_endpoint) == ("tcp://*:5560", "tcp://*:5660")
    assert settings.bind_mode is BindMode.CONNECT
    assert PublisherSettings(events_config=config, bind="bind").bind_mode is BindMode.BIND


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"events_config": "{"}, "must be a JSON object"),
        ({"events_config": "[1]"}, "must be a JSON object, not list"),
        ({"events_config": '{"topc": "x"}'}, "topc: no such events setting"),
        ({"events_config": '{"hwm": -1}'}, "hwm: -1"),
        ({"events_config": '{"hwm": "many"}'}, "hwm: 'many'"),
        ({"events_config": '{"publisher": "kafka"}'}, "publisher: 'kafka'"),
        ({"events_config": '{"bind": "maybe"}'}, "bind: 'maybe'"),
        (
            {"events_config": '{"replay_endpoint": "tcp://*:5558"}', "data_parallel_size": 2},
            "overlap",
        ),
        ({"bind": "perhaps"}, "bind"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        PublisherSettings(**settings)
