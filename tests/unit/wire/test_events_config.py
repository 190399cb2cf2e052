import pytest

from reprise_core.errors import InvalidInput
from reprise_wire.events_config import (
    BindMode,
    EventsConfig,
    SocketRole,
    check_port_ranges,
    endpoint_of_rank,
    socket_role,
)


def test_publisher_follows_the_switch_unless_it_is_named() -> None:
    assert EventsConfig().publisher == "null"
    assert EventsConfig(enable_kv_cache_events=True).publisher == "zmq"
    assert EventsConfig(enable_kv_cache_events=True, publisher="null").publisher == "null"
    assert EventsConfig(publisher="zmq").publishes is False


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"endpont": "tcp://*:1"}, "endpont"),
        ({"publisher": "kafka"}, "publisher"),
        ({"buffer_steps": -1}, "buffer_steps"),
        ({"hwm": "many"}, "hwm"),
        ({"max_queue_size": True}, "max_queue_size"),
        ({"bind": "maybe"}, "bind"),
    ],
)
def test_bad_settings_are_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{named}:"):
        EventsConfig.from_mapping(values)


def test_our_own_option_overrules_the_rule_by_which_a_concrete_address_connects() -> None:
    assert socket_role("tcp://127.0.0.1:5557") is SocketRole.CONNECT
    assert socket_role("tcp://127.0.0.1:5557", BindMode.BIND) is SocketRole.BIND
    assert socket_role("tcp://*:5557", BindMode.CONNECT) is SocketRole.CONNECT
    assert EventsConfig(endpoint="tcp://10.0.0.1:1", bind=BindMode.BIND).role is SocketRole.BIND


@pytest.mark.parametrize(
    "endpoint", ["tcp://host:+5", "tcp://host:-5", "tcp://host: 5", "tcp://host:5_5", "tcp://host:٥"]
)
def test_a_port_is_decimal_digits(endpoint: str) -> None:
    with pytest.raises(InvalidInput, match="endpoint"):
        endpoint_of_rank(endpoint, 1)


def test_four_ranks_get_four_ports_each() -> None:
    """sglang#29211: all ranks bound one port."""
    check_port_ranges("tcp://*:5557", "tcp://*:5657", 4)
    assert [endpoint_of_rank("tcp://*:5557", rank) for rank in range(4)] == [
        f"tcp://*:{port}" for port in range(5557, 5561)
    ]


@pytest.mark.parametrize(
    ("endpoint", "replay_endpoint", "num_ranks", "named"),
    [
        ("tcp://*:5557", "tcp://*:5557", 1, "replay_endpoint"),
        ("tcp://*:5557", "tcp://*:5560", 4, "replay_endpoint"),
        ("tcp://*:5560", "tcp://*:5557", 4, "replay_endpoint"),
        ("tcp://*:65533", None, 4, "endpoint"),
        ("tcp://*:5557", "tcp://*:65535", 2, "replay_endpoint"),
    ],
)
def test_ports_that_meet_or_do_not_exist_are_refused(
    endpoint: str, replay_endpoint: str | None, num_ranks: int, named: str
) -> None:
    with pytest.raises(InvalidInput, match=f"^{named}:"):
        check_port_ranges(endpoint, replay_endpoint, num_ranks)


@pytest.mark.parametrize(
    ("endpoint", "replay_endpoint", "num_ranks"),
    [
        ("tcp://*:5557", "tcp://*:5561", 4),
        ("tcp://*:5557", None, 100),
        ("tcp://*:0", "tcp://*:0", 4),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", 1),
        ("ipc:///run/kv", "tcp://*:5557", 1),
    ],
)
def test_other_ports_are_fine(endpoint: str, replay_endpoint: str | None, num_ranks: int) -> None:
    check_port_ranges(endpoint, replay_endpoint, num_ranks)
